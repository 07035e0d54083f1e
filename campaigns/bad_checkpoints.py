"""Damaged and hostile model files: refused by name. No code is run, nothing is written outside."""

import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from aligner.checkpoint.nemo.archive import ArchiveWriter
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.errors import AlignerError
from campaigns.harness import TINY, Campaign, run
from campaigns.state_pickles import payloads

_CHANGES: tuple[dict[str, Any], ...] = (
    *({"num_layers": -1}, {"num_layers": 10**9}, {"hidden_size": 0}, {"hidden_size": 65}),
    *({"num_attention_heads": 0}, {"num_attention_heads": 3}, {"vocab_size": 10**12}),
    *({"vocab_size": -1}, {"vocab_size": "x"}, {"rope_scaling": {"zzz": 1}}),
    *({"rope_scaling": "x"}, {"layernorm_epsilon": float("nan")}, {"activation": "evil"}),
    *({"num_layers": "${oc.env:HOME}"}, {"num_layers": "${num_layers}"}, {"tokenizer": "x"}),
    *({"num_moe_experts": -3}, {"tokenizer": {"files": ["a"]}}, {"window_size": "abc"}),
    *({"tokenizer": {"files": {"tokenizer.json": "nemo:nope"}}}, {"rotary_percentage": 17.0}),
)
_HF_CHANGES: tuple[dict[str, Any], ...] = (
    *({"num_hidden_layers": None}, {"num_hidden_layers": 10**9}, {"hidden_size": "64"}),
    *({"num_attention_heads": -4}, {"rope_scaling": [1]}, {"model_type": "evil"}),
    {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}},
)
_INDEXES: tuple[Any, ...] = (
    *({"a": 1}, {"weight_map": [1]}, {"weight_map": {"model.embed_tokens.weight": 5}}),
    {"weight_map": {"model.embed_tokens.weight": "../../../../etc/passwd"}},
)
_TOKENIZER_NAMES = ("../../planted", "{folder}/planted", "sub/planted", "", "config.json")
Members = dict[str, bytes]


def run_campaign(campaign: Campaign) -> None:
    """Open each file once, and convert it if it names files."""
    mark = campaign.folder / "code_was_run"
    with tarfile.open(TINY) as tar:
        members = {
            member.name.removeprefix("./"): tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar
            if member.isreg()
        }
    cases = _nemo_cases(campaign, members, mark) | _hugging_face_cases(campaign, mark)
    for name, make in campaign.while_time(sorted(cases.items())):
        path, call = make()
        files_before = _around(campaign)
        outcome = run(campaign, None, call=call, timeout_s=60, memory_gib=14)
        planted, was_run = _around(campaign) - files_before, mark.exists()
        mark.unlink(missing_ok=True)
        note = f"{outcome.verdict}: {outcome.last}"
        if planted or was_run:
            note = f"{'CODE WAS RUN; ' if was_run else ''}written outside: {planted}; {note}"
        campaign.record(name, outcome.is_clean and not planted and not was_run, note)
        shutil.rmtree(path, ignore_errors=True)


Case = Callable[[], tuple[Path, Callable[[], None]]]


def _nemo_cases(campaign: Campaign, members: Members, mark: Path) -> dict[str, Case]:
    config = yaml.safe_load(members["model_config.yaml"])
    raw = TINY.read_bytes()

    def case(name: str, content: Callable[[], Members | bytes]) -> Case:
        def make() -> tuple[Path, Callable[[], None]]:
            path = campaign.folder / "damaged.nemo"
            data = content()
            path.write_bytes(data) if isinstance(data, bytes) else _write(path, data)
            output = campaign.fresh("deep") / "er" / "hf"
            return output, lambda: _convert_nemo(path, output)

        return make

    def configured(changes: dict[str, Any]) -> Callable[[], Members]:
        text = yaml.safe_dump({**config, **changes}).encode()
        return lambda: {**members, "model_config.yaml": text}

    def flipped(count: int) -> Callable[[], bytes]:
        def flip() -> bytes:
            data = bytearray(raw)
            for _ in range(count):
                data[campaign.rng.randrange(len(data))] ^= 1 << campaign.rng.randrange(8)
            return bytes(data)

        return flip

    cases: dict[str, Case] = {}
    for cut in (0, 1, 512, 5000, len(raw) // 2, len(raw) - 20_000):
        cases[f"nemo cut at {cut}"] = case("cut", lambda cut=cut: raw[:cut])  # type: ignore[misc]
    for number in range(6):
        cases[f"nemo flipped {number}"] = case("flip", flipped(8 ** (number % 3)))
    for changes in _CHANGES:
        cases[f"nemo {changes}"] = case("config", configured(changes))
    for text in (b"[1]", b"\xff\xfe", b"[" * 5000, b"!!python/object/apply:os.system [x]"):
        cases[f"nemo yaml {text[:12]!r}"] = case(
            "yaml",
            lambda text=text: {**members, "model_config.yaml": text},  # type: ignore[misc]
        )
    tokenizer = config["tokenizer"]
    file_name = next(iter(tokenizer["files"].values()))
    for name in _TOKENIZER_NAMES:
        path = name.format(folder=campaign.folder)
        files = {**tokenizer["files"], path: file_name}
        cases[f"nemo tokenizer file {name!r}"] = case(
            "name", configured({"tokenizer": {**tokenizer, "files": files}})
        )
    for kind, payload in payloads(mark).items():
        for name in (".metadata", "common.pt", "__0_0.distcp"):
            member_path = f"model_weights/{name}"
            cases[f"nemo {kind} in {name}"] = case(
                "pickle",
                lambda member_path=member_path, payload=payload: {**members, member_path: payload},  # type: ignore[misc]
            )
        rank = {name: data for name, data in members.items() if "model_weights" not in name}
        cases[f"nemo {kind} as weights"] = case(
            "rank",
            lambda rank=rank, payload=payload: {**rank, "model_weights.ckpt": payload},  # type: ignore[misc]
        )
    return cases


def _hugging_face_cases(campaign: Campaign, mark: Path) -> dict[str, Case]:
    good = campaign.fresh("good_hf")
    _convert_nemo(TINY, good)
    config = json.loads((good / "config.json").read_text())

    def case(change: Callable[[Path], object]) -> Case:
        def make() -> tuple[Path, Callable[[], None]]:
            folder = campaign.fresh("damaged_hf")
            shutil.copytree(good, folder)
            (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
            change(folder)
            return folder, lambda: _convert_hugging_face(folder, campaign.folder / "out.nemo")

        return make

    def write(name: str, content: bytes) -> Case:
        return case(lambda folder: (folder / name).write_bytes(content))

    weights = (good / "model.safetensors").read_bytes()
    cases = {
        f"hf {changes}": write("config.json", json.dumps({**config, **changes}).encode())
        for changes in _HF_CHANGES
    }
    for index in _INDEXES:
        text = json.dumps(index).encode()
        cases[f"hf index {index}"] = write("model.safetensors.index.json", text)
    for content in (b"", b"{", b"[]", b"[" * 100_000):
        cases[f"hf config.json {content[:4]!r} of {len(content)}"] = write("config.json", content)
        name = "tokenizer_config.json"
        cases[f"hf {name} {content[:4]!r} of {len(content)}"] = write(name, content)
    for kind, content in {**payloads(mark), "cut": weights[:-1000], "empty": b""}.items():
        cases[f"hf weights {kind}"] = write("model.safetensors", content)
    return cases


def _write(path: Path, members: Members) -> None:
    with open(path, "wb") as stream:
        archive = ArchiveWriter(stream)
        for name, data in members.items():
            archive.add(name, data)
        archive.finish()


def _around(campaign: Campaign) -> set[str]:
    """Return files that a conversion must not create."""
    inside = {"deep", "damaged_hf"}
    folders = [campaign.folder, campaign.folder.parent]
    return (
        {path.name for folder in folders for path in folder.iterdir()}
        - inside
        - {"out.nemo", "run.log"}
    )


def _convert_nemo(source: Path, output: Path) -> None:
    from aligner.checkpoint.hf.model_folder import save_hf

    def convert() -> None:
        with open_nemo(source) as nemo:
            nemo.tokenizer.encode("1+1=")
            save_hf(output, nemo.weights, nemo.architecture, nemo.tokenizer_files)

    _expect_error(convert)


def _convert_hugging_face(source: Path, output: Path) -> None:
    from aligner.checkpoint.hf.model_folder import read_hf
    from aligner.checkpoint.nemo.model_file import save_nemo

    def convert() -> None:
        model = read_hf(source)
        save_nemo(output, model.weights, model.architecture, model.tokenizer_files)

    _expect_error(convert)


def _expect_error(action: Callable[[], None]) -> None:
    try:
        action()
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(2)
