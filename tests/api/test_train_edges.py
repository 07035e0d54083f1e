"""Keywords, paths and texts that training functions and models refuse or read in several forms."""

import pytest

import aligner
from aligner.api import train
from aligner.api.result import Result
from aligner.errors import ConfigError, DataError

ROWS = [{"prompt": "1 + 2 = ", "response": "3"}]


@pytest.fixture
def model(tiny_nemo):
    with aligner.load_model(tiny_nemo) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"data": 5}, r"data\.train\.source=5 is no path and has no rows"),
        ({"overrides": ["seed=1"]}, r"overrides=\['seed=1'\] is no mapping"),
        ({"output_dir": None}, "output_dir=None is no path"),
        *(
            ({"output_dir": f"{__file__}{end}"}, r"output_dir=.*test_train_edges\.py is a file")
            for end in ("", "/run/1")
        ),
        *(
            ({"lr": 1e-3, "overrides": clash}, r"overrides sets model\.optim\.lr, which a keyword")
            for clash in ({"model.optim.lr": 1e-4}, {"model": {"optim": {"lr": 1e-4}}})
        ),
    ],
)
def test_unusable_keywords_are_refused_with_their_value(tmp_path, keywords, message):
    arguments = {"model": "m.nemo", "data": ROWS, "output_dir": tmp_path / "run", **keywords}
    with pytest.raises(ConfigError, match=message):
        aligner.train_sft(**arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", "; did you mean lr? Its keywords"),
        ("max_step", "; did you mean max_steps? Its keywords"),
        ("xyzzy", ". Its keywords"),
    ],
)
def test_an_unknown_keyword_gets_the_nearest_name(name, hint):
    with pytest.raises(TypeError) as caught:
        aligner.train_sft(model="m.nemo", data=ROWS, **{name: 1})
    assert f"has no keyword '{name}'{hint} are model, " in str(caught.value)


def test_models_are_found_and_written_in_the_home_directory(tiny_nemo, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy.nemo").symlink_to(tiny_nemo)
    result = Result(tmp_path, "")
    for path in ("~/new/copy.nemo", "~/new/hf"):
        assert result.save(path) == tmp_path / path[2:]
    with aligner.load_model("~/new/copy.nemo") as model:
        assert model.save("~/newer/again.nemo").stat().st_size > 0
    # A run without the file of the model says where it searched.
    with pytest.raises(aligner.errors.CheckpointNotFoundError, match=f"{tmp_path}/missing.nemo"):
        aligner.train_sft(model="~/missing.nemo", data=ROWS, output_dir=tmp_path / "run")


def test_a_model_without_a_nemo_form_is_not_written_to_a_nemo_file(tmp_path):
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match=r"path=.*x\.nemo: the model has no \.nemo form"):
        Result(tmp_path, "").save(tmp_path / "new" / "x.nemo")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"path=.*Not a directory|path=.*File exists"):
        Result(tmp_path, "").save(tmp_path / "file" / "x")


def test_a_table_needs_a_step(tmp_path):
    with pytest.raises(ConfigError, match="no metrics"):
        Result(tmp_path, "").to_pandas()


def test_a_stop_text_is_one_string(model):
    options = {"max_new_tokens": 12, "seed": 3}
    answer = model.generate(["1 + 1 = "], **options)[0]
    stop = f"{answer[0]}§"  # the answer contains its first character only
    assert model.generate(["1 + 1 = "], stop=stop, **options) == [answer]


def test_more_tokens_than_positions_are_refused(model):
    with pytest.raises(DataError, match=r"prompts\[1\] and responses\[1\] have \d{4,} tokens"):
        model.logprobs(["1", "1"], ["2", "2" * 5000])


def test_a_closed_model_says_so(model, tmp_path):
    model.close()
    for call in (
        lambda: model.generate(["1"]),
        lambda: model.logprobs(["1"], ["2"]),
        lambda: model.save(tmp_path / "saved"),
    ):
        with pytest.raises(ConfigError, match="the model is closed"):
            call()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("column", ["level", "answer", "ground_truth"])
def test_rows_of_a_generator_function_need_no_ground_truths(tmp_path, monkeypatch, column):
    def rows(last, name="level"):
        print("a line of the function")
        yield from ({"prompt": f"{i} ", name: i} for i in range(last))

    arguments = []
    monkeypatch.setattr(train, "run_script", lambda _, words: arguments.extend(words))
    overrides = {"data.train.arguments.last": 3, "data": {"train": {"arguments": {"name": column}}}}
    aligner.train_grpo(model="m", data=rows, overrides=overrides, output_dir=tmp_path / "run")
    assert ("data.ground_truth_column=null" in arguments) == (column == "level")


def test_nested_overrides_replace_what_the_function_chooses(tmp_path, monkeypatch):
    arguments = []
    monkeypatch.setattr(train, "run_script", lambda _, words: arguments.extend(words))
    nested = {"trainer": {"sft": {"max_epochs": 2}}}
    folder = tmp_path / "run"
    aligner.train_sft(model="m", data=ROWS, max_steps=9, overrides=nested, output_dir=folder)
    epochs = [word for word in arguments if "max_epochs" in word]
    assert epochs == ["trainer.sft.max_epochs=9", "trainer={sft:{max_epochs:2}}"]
