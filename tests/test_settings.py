"""Where settings come from, what they may be, and that everything shipped with them is there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvcli.cli import settings
from kvcli.cli.settings import Resolved, find_profile, profiles, resolve
from kvcli.errors import UsageError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def user_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config file, in a folder of its own; it does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(settings, "user_file", lambda: tmp_path / "config.yaml")
    return tmp_path / "config.yaml"


def settle(folder: Path, environ: dict[str, str] | None = None, **flags: object) -> Resolved:
    return resolve(flags, environ or {}, folder)


def test_each_source_beats_the_next(tmp_path: Path, user_config: Path) -> None:
    profile = tmp_path / "mine.yaml"
    layers = [
        ("default", lambda: None),
        (str(user_config), lambda: user_config.write_text("max-new-tokens: 1")),
        (str(tmp_path / "kvcli.yaml"), lambda: (tmp_path / "kvcli.yaml").write_text("max_new_tokens: 2")),
        (str(profile), lambda: profile.write_text("max-new-tokens: 3")),
    ]
    for number, (source, write) in enumerate(layers):
        write()
        flags = {"profile": str(profile)} if profile.exists() else {}
        got = settle(tmp_path, **flags)
        assert (got.max_new_tokens, got.sources["max_new_tokens"]) == (number or 128, source)
    environ = {"KVCLI_MAX_NEW_TOKENS": "4", "KVCLI_PROFILE": str(profile)}
    assert settle(tmp_path, environ).sources["max_new_tokens"] == "environment"
    got = settle(tmp_path, environ, max_new_tokens="5")
    assert (got.max_new_tokens, got.sources["max_new_tokens"]) == (5, "flag")


def test_a_profile_named_in_a_file_is_used_unless_a_flag_names_another(tmp_path: Path, user_config: Path) -> None:
    (tmp_path / "kvcli.yaml").write_text("profile: fast\n")
    assert settle(tmp_path).profile == "fast"
    assert settle(tmp_path, profile="faithful").policy == "full"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bugdet: 0.2", "unknown setting bugdet; did you mean budget?"),
        ("budget: 0", "budget must be a share kept"),
        ("budget: true", "budget must be a share kept"),
        ("budget: 1.5", "budget must be a share kept"),
        ("max-new-tokens: 2.5", "max-new-tokens must be a whole number of at least 1, not 2.5"),
        ("ordered: perhaps", "ordered must be true or false"),
        ("prompt: 5", "prompt must be text"),
        ("dtype: int8", "dtype must be one of auto, float32"),
        *((f"shard: {text}", "shard must be i/n") for text in ("0/4", "5/4", "1", "1/", "a/b", "1/0", "-1/4", "1/4/4")),
        ("- a list", "must hold lines of `name: value`"),
        ("prompt: [1", "no valid YAML"),
        ("x: !!python/object/apply:os.getcwd []", "no valid YAML"),
        ("from-file: list.txt", "unknown setting from-file"),
        ("profile: fast", "a profile can't name another"),
    ],
)
def test_a_wrong_profile_is_one_clear_line(tmp_path: Path, user_config: Path, text: str, message: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        settle(tmp_path, profile=str(tmp_path / "p.yaml"))
    assert message in str(error.value)
    assert "p.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_budget_of_one_is_the_whole_cache_and_a_count_stays_a_count(tmp_path: Path, user_config: Path) -> None:
    whole, count = settle(tmp_path, budget="1").budget, settle(tmp_path, budget="256").budget
    assert (whole, type(whole)) == (1.0, float)
    assert (count, type(count)) == (256, int)


def test_policy_options_add_up_but_never_reach_another_policy(tmp_path: Path, user_config: Path) -> None:
    (tmp_path / "kvcli.yaml").write_text("policy: elastic\nset: {distance: 10, decode: grow}\n")
    assert settle(tmp_path, set=["distance=7"]).set == {"distance": "7", "decode": "grow"}
    assert settle(tmp_path, policy="full", set=["x=1"]).set == {"x": "1"}


def test_prompt_and_prompt_file_are_one_thing(tmp_path: Path, user_config: Path) -> None:
    (tmp_path / "kvcli.yaml").write_text("prompt-file: long.txt\n")
    assert settle(tmp_path).prompt_file == "long.txt"
    assert settle(tmp_path, prompt="short").prompt_file is None
    with pytest.raises(UsageError, match="exclude each other"):
        settle(tmp_path, prompt="a", prompt_file="b")


def test_a_misspelt_variable_is_named_not_obeyed(tmp_path: Path, user_config: Path) -> None:
    notes = settle(tmp_path, {"KVCLI_BUGDET": "0.5", "KVCLI_CACHE": "/somewhere"}).notes
    assert len(notes) == 1
    assert "KVCLI_BUGDET" in notes[0]
    assert "KVCLI_BUDGET" in notes[0]


def test_a_wrong_variable_is_named(tmp_path: Path, user_config: Path) -> None:
    with pytest.raises(UsageError, match="KVCLI_SEED must be a whole number"):
        settle(tmp_path, {"KVCLI_SEED": "often"})


def test_an_unknown_profile_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean elastic-paper"):
        find_profile("elastic-papr")


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_shipped_profile_gives_a_policy(tmp_path: Path, user_config: Path, name: str) -> None:
    from kvcli.cli.run import make_policy

    got = settle(tmp_path, profile=name)
    assert make_policy(got).resolved().items() >= got.set.items()


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "kvcli").rglob("*.py")}
    assert {name.replace(".", "/") for name in listed} >= folders
    assert "kvcli.profiles" in listed
