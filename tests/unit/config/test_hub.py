"""Names of the Hugging Face hub: the local cache, a download from a server, and the refusals."""

import shutil

import pytest
from hf_models import save_random_model
from hub import REVISION, hub

import aligner
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.commands import main
from aligner.config import SFTRunConfig
from aligner.config.load import parse_config
from aligner.data.readers import read_rows, source_files
from aligner.errors import CheckpointNotFoundError, ConfigError, DataError

FILES = {
    "models/Org/Tiny-1.5B": ("config.json", "model.safetensors", "pytorch_model.bin"),
    "models/Org/Parts": ("tokenizer.json",),
    "datasets/Org/Sums": tuple(
        f"data/{name}.jsonl" for name in ("train-0-of-2", "train-1-of-2", "test-0-of-1")
    ),
    "datasets/Org/Two": ("a/train.jsonl", "b/train.jsonl"),
}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Names of the files that a server of `FILES` was asked for. The cache is empty."""
    for name, files in FILES.items():
        for file in files:
            path = tmp_path / "served" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'{{"prompt": "{file}", "response": "x"}}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub({name: tmp_path / "served" / name for name in FILES}) as (url, names):
        point_to(url, monkeypatch)
        yield names


def point_to(url, monkeypatch):
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def paths(model="Org/Tiny-1.5B", source="Org/Sums", **settings):
    """Paths of model and data in the configuration of a run."""
    values = {"model": {"restore_from_path": model}, "data": {"train": {"source": source}}}
    config = parse_config({**values, **settings}, SFTRunConfig)
    return config.model.restore_from_path, config.data.train.source


def test_names_are_downloaded_only_if_the_run_asks_and_then_found_in_the_cache(
    served, monkeypatch, tmp_path
):
    assert paths() == ("Org/Tiny-1.5B", "Org/Sums")
    assert served == []
    model, source = paths(download=True)
    assert {*served} == {
        *("Org/Tiny-1.5B/config.json", "Org/Tiny-1.5B/model.safetensors"),
        *("Org/Sums/data/train-0-of-2.jsonl", "Org/Sums/data/train-1-of-2.jsonl"),
    }
    assert model == str(tmp_path / f"cache/models--Org--Tiny-1.5B/snapshots/{REVISION}")
    rows = [row.columns["prompt"] for row in read_rows(source)]
    assert rows == ["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl"]
    tested = paths(source=["Org/Sums/data/test*.jsonl", "Org/Sums"], download=True)[1]
    assert [len(source_files(part)) for part in tested] == [1, 2]
    # Without a network the cache is used, also if the run asks for a download.
    point_to("http://127.0.0.1:9", monkeypatch)
    assert paths() == paths(download=True) == (model, source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "Org/None"}, r"^model\.restore_from_path=Org/None: the model cannot be.*404"),
        ({"source": "Org/None"}, r"^data\.train\.source=Org/None: the dataset cannot be.*HF_TOKEN"),
        ({"source": "Org/Two"}, r"^data\.train\.source=Org/Two.*a/train.jsonl, b/train.jsonl"),
        ({"source": ["Org/Two"]}, r"several training sets or none.*Org/Two/data/train-\*\.parquet"),
    ],
)
def test_a_download_without_a_result_is_refused_by_key(served, settings, message):
    with pytest.raises(ConfigError, match=message):
        paths(**settings, download=True)


@pytest.mark.integration
def test_a_model_is_downloaded_to_be_loaded_or_converted(served, tmp_path, capsys):
    save_random_model("llama", {}, tmp_path / "served/models/Org/Parts")
    command = ["convert", "--input", "Org/Parts", "--output", "m.nemo"]
    with pytest.raises(CheckpointNotFoundError, match="set download=true"):
        aligner.load_model("Org/Parts")
    with pytest.raises(SystemExit, match="set download=true"):
        main(command)
    assert served == []
    with aligner.load_model("Org/Parts", download=True) as model:
        assert len(model.generate(["2+3="], max_new_tokens=1)) == 1
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(SystemExit, match="input=Org/None: the model cannot be downloaded"):
        main([*command[:2], "Org/None", *command[3:], "download=true"])
    main([*command, "download=true"])
    assert "wrote m.nemo: llama" in capsys.readouterr().out
    with open_nemo("m.nemo") as nemo:
        assert nemo.tokenizer.encode("a") == [97]


def test_existing_files_precede_the_hub(served, tmp_path):
    for name in ("Org/Tiny-1.5B/x", "Org/Sums/data/own.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    for source in ("Org/Sums", "Org/Sums/data/*.jsonl", "Org/Sums/rows.py:rows"):
        assert paths(source=source, download=True) == ("Org/Tiny-1.5B", source)
    assert served == []
    assert paths("Org/Parts", "Org/Sums", download=True)[0] == "Org/Parts"  # without a model


def test_a_missing_name_is_told_what_to_do(served):
    with pytest.raises(CheckpointNotFoundError) as error, open_model("Org/Tiny-1.5B"):
        pass
    assert "set download=true, run hf download Org/Tiny-1.5B, or give a dir" in str(error.value)
    with pytest.raises(CheckpointNotFoundError) as error, open_model("models/m.nemo"):
        pass
    assert "hub" not in str(error.value)
    for source in ("Org/Sums", "Org/Sums/data/train-*.parquet"):
        with pytest.raises(DataError, match="hf download Org/Sums --repo-type dataset, or give"):
            source_files(source)
    with pytest.raises(DataError, match=r"rows\.jsonl does not exist$"):
        source_files("data/rows.jsonl")
