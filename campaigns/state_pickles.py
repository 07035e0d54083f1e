"""Pickles that run code, in every file of a run state: refused, and nothing is run."""

import io
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch

from campaigns.harness import PPO, Campaign, run

_PLACES = ("rng.pt", "policy/rank_00000.pt", "value/rank_00000.pt", "state.json")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def payloads(mark: Path) -> dict[str, bytes]:
    """Return each way in which torch has saved objects, with code inside."""
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"a": Evil(mark)}, zipped)
    torch.save({"a": Evil(mark)}, legacy, _use_new_zipfile_serialization=False)
    plain = pickle.dumps(Evil(mark))
    return {"pickle": plain, "torch": zipped.getvalue(), "legacy": legacy.getvalue()}


def run_campaign(campaign: Campaign) -> None:
    """Put one payload in one place at a time. The manifest contains its size and checksum."""
    mark, base = campaign.folder / "code_was_run", campaign.fresh("base")
    log_dir = f"exp_manager.explicit_log_dir={base}"
    first = run(campaign, "train_gpt_ppo", [*PPO, log_dir])
    if first.status:
        campaign.record("the first step", False, first.last)
        return
    kinds = payloads(mark)
    for name, kind in campaign.while_time([(name, kind) for name in _PLACES for kind in kinds]):
        folder = campaign.fresh("damaged")
        shutil.copytree(base, folder)
        for file in folder.glob(f"run_state/*/{name}"):
            file.write_bytes(kinds[kind])
            _admit(file.parents[len(Path(name).parts) - 1] / "manifest.json", name, kinds[kind])
        arguments = [*PPO, f"exp_manager.explicit_log_dir={folder}", "trainer.ppo.max_steps=2"]
        outcome = run(campaign, "train_gpt_ppo", arguments)
        was_run = mark.exists()
        mark.unlink(missing_ok=True)
        note = f"{'CODE WAS RUN; ' if was_run else ''}{outcome.verdict}: {outcome.last}"
        campaign.record(f"{kind} in {name}", outcome.verdict == "refused" and not was_run, note)


def _admit(manifest: Path, name: str, content: bytes) -> None:
    """Write the payload's size and checksum into the manifest."""
    described = json.loads(manifest.read_text())
    described["files"][name] = len(content)
    described.get("checksums", {})[name] = f"{zlib.crc32(content):08x}"
    manifest.write_text(json.dumps(described))
