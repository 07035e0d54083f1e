"""`make campaign`: what it tells of its campaigns, and that they run."""

import subprocess
import sys
import types

import pytest
from documented import ROOT


def test_one_line_each_and_a_status(monkeypatch, tmp_path, capsys, tiny_nemo):
    """A failure, and an exception of a campaign itself, are failures of the whole."""
    monkeypatch.syspath_prepend(str(ROOT))
    from campaigns import __main__ as entry

    def named(name, action):
        module = types.ModuleType(f"campaigns.{name}")
        module.run_campaign = action
        monkeypatch.setitem(sys.modules, f"campaigns.{name}", module)

    def breaks(campaign):
        raise KeyError("x")

    orders = []
    named("good", lambda campaign: orders.append(list(campaign.while_time(range(20)))))
    named("bad", lambda campaign: campaign.record("a case", False, "was not right"))
    named("broken", breaks)
    monkeypatch.setattr(entry, "NAMES", ("good", "bad", "broken"))
    monkeypatch.setattr(entry, "TINY", tiny_nemo)

    def status(*words):
        monkeypatch.setattr(sys, "argv", ["campaigns", "--out", str(tmp_path), *words])
        return entry.main()

    assert status("good", "--seed", "1") == status("good", "--seed", "1") == 0
    assert status("good", "--seed", "2") == 0
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(20))
    assert status("good", "--minutes", "0") == 0
    assert len(orders[3]) == 1
    capsys.readouterr()
    assert status() == 1
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[:2] for line in lines] == [
        ["good", "passed:"],
        ["bad", "FAILED:"],
        ["broken", "FAILED:"],
    ]


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        *("config_fuzz", "bad_data", "state_pickles", "bad_rewards", "environments"),
        *("hostile_values", "flipped_bits", "sandbox_folders", "serve_inputs", "changed_resume"),
    ],
)
def test_a_campaign_runs(name):
    """The quick ones, for some seconds."""
    words = [sys.executable, "-m", "campaigns", "--minutes", "0.1", name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert f"{name:16s} passed: " in done.stdout
