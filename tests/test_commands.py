"""The command `aligner`: every script under a name, from a checkout and from an installed wheel."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documented import ROOT
from packaging.requirements import Requirement

from aligner.commands import COMMANDS, main, shipped, usage

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ran(*command, **options):
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )


def test_every_script_has_a_command():
    """The two directions of `convert` are old names of one command."""
    files = (ROOT / "examples").glob("*.py")
    scripts = {path.stem for path in files if 'if __name__ == "__main__"' in path.read_text()}
    known = {command.script for command in COMMANDS.values()}
    assert scripts - known == {"convert_hf_to_nemo", "convert_nemo_to_hf"}
    assert known - scripts == {"tasks/tiny_model"}


def test_help_lists_every_command_and_imports_nothing_heavy():
    code = "import sys; from aligner.commands import main; main(['--help']); print(*sys.modules)"
    done = ran(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    text, modules = done.stdout.rsplit("\n", 2)[:2]
    assert text == usage()
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in COMMANDS)
    assert {"torch", "omegaconf", "hydra", "megatron"} & set(modules.split()) == set()


def test_a_misspelt_command_is_corrected():
    with pytest.raises(SystemExit, match=r"train-pp0: no such command. Did you mean train-ppo\?"):
        main(["train-pp0"])


def test_the_script_itself_is_run(monkeypatch, capsys):
    """So that whatever starts a run again finds a file with a path in the command line."""
    monkeypatch.setattr(sys, "argv", ["aligner"])
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--help"])
    assert ended.value.code == 0
    assert sys.argv == [str(ROOT / "examples" / "convert.py"), "--help"]
    assert "usage: convert.py" in capsys.readouterr().out


def test_ranges_hold_the_tested_versions():
    """pyproject.toml states what may be installed, requirements.txt what the suite ran with."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for name in extras for text in extras[name])]
    ranges = {(one := Requirement(text)).name: one for text in texts}
    assert {one.name for one in pinned} == set(ranges) - {"wandb", "aligner"}
    for one in pinned:
        for version in (spec.version for spec in one.specifier if spec.operator == "=="):
            assert ranges[one.name].specifier.contains(version), one
            assert str(ranges[one.name].specifier) != str(one.specifier), f"{one}: no range"


@pytest.mark.extended
def test_an_installed_wheel_needs_no_checkout(tmp_path, installed):
    """Commands, a recipe and a conversion, from another folder."""
    site, away = installed, tmp_path
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def aligner(*arguments):
        done = ran(sys.executable, site / "bin" / "aligner", *arguments, cwd=away, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"{site}/aligner/conf/recipes" in aligner("--help")
    kinds, templates = (".yaml", ".py", ".sbatch"), Path("observe", "report", "templates")
    wanted = [(shipped(name), Path(name)) for name in ("conf", "examples")]
    for folder, copy in (*wanted, (ROOT / "aligner" / templates, templates)):
        files = [path for path in folder.rglob("*.*") if path.suffix in kinds or copy == templates]
        names = [path.relative_to(folder) for path in files]
        assert [name for name in names if not (site / "aligner" / copy / name).is_file()] == []
    assert (site / "aligner_plan" / "dry" / "guard.cpp").is_file()
    assert (site / "aligner" / "py.typed").is_file()
    assert "plan.device: h100-80g" in aligner("plan", "--help")
    job = aligner("train-ppo", "--config-name", "recipes/ppo_tiny_cpu", "--cfg", "job")
    assert "restore_from_path: models/tiny.nemo" in job
    made = ("-m", "aligner.checkpoint.tiny", "--output", "tiny.nemo")  # its published path
    assert ran(sys.executable, *made, cwd=away, env=environment).returncode == 0
    aligner("make-tiny-model", "other.nemo")
    assert (away / "other.nemo").is_file()
    line = aligner("convert", "--input", "tiny.nemo", "--output", "hf")
    assert re.fullmatch(r"wrote hf: \w+, .* parameters, .* vocabulary \d+ \(.*iB\)\n", line)
    assert (away / "hf" / "model.safetensors").exists()
