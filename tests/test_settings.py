"""Settings: what each text means, which source wins, and the warning about an unknown name."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nsa
from nsa import settings
from nsa.settings import BY_ENV, BY_NAME, SETTINGS, Settings

# The names in users' runbooks (DESIGN.md, Environment).
RUNBOOK_NAMES = {
    "NSA_USE_FA2",
    "NSA_USE_FA2_WIN",
    "NSA_USE_FA2_CMP",
    "NSA_FA2_MIN_LEN_WIN",
    "NSA_FA2_MIN_LEN_CMP",
    "NSA_FA2_PREF_FP16",
    "NSA_FORCE_PARITY",
    "NSA_SDPA_NO_FLASH",
    "NSA_SDPA_AUDIT",
    "NSA_DEBUG_TIMING",
    "NSA_SEQ_LEN",
    "NSA_BATCH_SIZE",
    "NSA_ACCUM",
    "NSA_NO_GC",
    "NSA_FWE_DOC_BATCH",
    "NSA_FWE_PREFETCH",
    "NSA_FWE_Q",
    "NSA_TEST_FA2",
}
BOOLEANS = [setting for setting in SETTINGS if setting.kind is bool]
INTEGERS = [setting for setting in SETTINGS if setting.kind is int]
PATHS = [setting for setting in SETTINGS if setting.kind is str]


def test_every_runbook_name_is_a_setting() -> None:
    assert set(BY_ENV) == RUNBOOK_NAMES | {"NSA_REPLAY", "NSA_TUNED_TILES"}
    assert all(setting.meaning for setting in SETTINGS)


def test_without_any_source_every_value_is_the_default() -> None:
    loaded = Settings.load(environ={})
    for setting in SETTINGS:
        assert getattr(loaded, setting.name) == setting.default
        assert loaded.source(setting.name) == "default"


@pytest.mark.parametrize("setting", BOOLEANS, ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), (" on ", True), ("0", False), ("False", False), ("no", False),
     ("off", False), ("", False)],
)  # fmt: skip
def test_a_boolean_is_read_from_text(setting: settings.Setting, text: str, value: bool) -> None:
    assert getattr(Settings.load(environ={setting.env: text}), setting.name) is value


@pytest.mark.parametrize("setting", INTEGERS, ids=lambda s: s.name)
def test_an_integer_is_read_from_text(setting: settings.Setting) -> None:
    for value in (setting.at_least, 8192):
        assert getattr(Settings.load(environ={setting.env: str(value)}), setting.name) == value


@pytest.mark.parametrize("setting", PATHS, ids=lambda s: s.name)
def test_a_path_is_read_as_it_stands(setting: settings.Setting) -> None:
    assert getattr(Settings.load(environ={setting.env: " ~/a b.json "}), setting.name) == "~/a b.json"
    with pytest.raises(ValueError, match=f"{setting.env} is ''"):
        Settings.load(environ={setting.env: " "})


@pytest.mark.parametrize("setting", BOOLEANS + INTEGERS, ids=lambda s: s.name)
@pytest.mark.parametrize("text", ["maybe", "1.5", "-7"])
def test_a_wrong_text_is_an_error_that_names_the_variable(setting: settings.Setting, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting.env} is '{re.escape(text)}'|{setting.env} is -7") as error:
        Settings.load(environ={setting.env: text})
    assert "accepted:" in str(error.value)


def test_runbooks_that_switch_fa2_off_with_minus_one_still_load() -> None:
    assert Settings.load(environ={"NSA_FA2_MIN_LEN_WIN": "-1"}).fa2_min_len_win == -1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("force_parity", 1),
        ("seq_len", True),
        ("seq_len", "512"),
        ("seq_len", 0),
        ("tuned_tiles", 1),
        ("tuned_tiles", ""),
    ],
)
def test_a_file_must_give_the_right_type(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} .*is {value!r}"):
        Settings.load(environ={}, file={name: value})


@pytest.mark.parametrize(
    ("layers", "value", "source"),
    [
        ("", 0, "default"),
        ("f", 1, "file"),
        ("e", 2, "environment"),
        ("c", 3, "command line"),
        ("fe", 2, "environment"),
        ("fc", 3, "command line"),
        ("ec", 3, "command line"),
        ("fec", 3, "command line"),
    ],
)
def test_the_command_line_beats_the_environment_beats_the_file(layers: str, value: int, source: str) -> None:
    loaded = Settings.load(
        file={"seq_len": 1} if "f" in layers else None,
        environ={"NSA_SEQ_LEN": "2"} if "e" in layers else {},
        command_line={"seq_len": 3} if "c" in layers else None,
    )
    assert (loaded.seq_len or 0, loaded.source("seq_len")) == (value, source)
    assert loaded.source("batch_size") == "default"


def test_a_lower_source_is_checked_even_where_a_higher_one_wins() -> None:
    with pytest.raises(ValueError, match="NSA_SEQ_LEN"):
        Settings.load(environ={"NSA_SEQ_LEN": "long"}, command_line={"seq_len": 3})


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_misspelled_variable_warning_names_the_nearest_setting(setting: settings.Setting) -> None:
    with pytest.warns(UserWarning, match=rf"{setting.env}X .*{setting.env}$"):
        Settings.load(environ={f"{setting.env}X": "1"})
    assert settings.unknown_names({setting.env: "1"}) == {}


@pytest.mark.parametrize("name", ["NSA_PREFILL_BATCHED", "NSA_USE_SEL_PACK", "NSA_SEL_RANGES_V2"])
def test_an_export_that_is_no_longer_needed_is_accepted(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Settings.load(environ={name: "1"}) == Settings.load(environ={})
    assert settings.unknown_names({name: "1"}) == {}
    assert list(settings.retired_names({name: "1", "NSA_SEQ_LEN": "8"})) == [name]
    # One that is nearly spelled so is still unknown.
    assert list(settings.unknown_names({f"{name}X": "1"})) == [f"{name}X"]


def test_variables_of_torch_are_reported_where_they_are_set() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PATH": "/bin"}
    assert settings.torch_variables(environ) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert settings.torch_variables({}) == {}


def test_other_programs_variables_are_none_of_our_business() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings.load(environ={"NSACCT": "x", "PATH": "/bin", "nsa_seq_len": "8"})


def test_unknown_name_in_file_or_option_is_an_error_with_nearest() -> None:
    with pytest.raises(ValueError, match=r"'seqlen'.* seq_len"):
        Settings.load(environ={}, file={"seqlen": 8})
    with pytest.raises(ValueError, match=r"'NSA_USE_FA2'.* use_fa2"):
        settings.parse_overrides(["NSA_USE_FA2=0"])


@given(st.text(max_size=20))
def test_there_is_always_a_nearest_name(name: str) -> None:
    assert settings.nearest(name, BY_NAME) in BY_NAME


def test_overrides_are_parsed_and_the_last_one_wins() -> None:
    given = settings.parse_overrides(["seq_len=8", "use_fa2=off", "seq_len=16"])
    assert given == {"seq_len": 16, "use_fa2": False}
    with pytest.raises(ValueError, match=r"'use_fa2'.*name=value"):
        settings.parse_overrides(["use_fa2"])
    with pytest.raises(ValueError, match=r"seq_len .*''"):
        settings.parse_overrides(["seq_len="])


def test_a_settings_file_is_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"seq_len": 64, "no_gc": True}))
    loaded = Settings.load(environ={}, file=settings.read_file(path))
    assert (loaded.seq_len, loaded.no_gc, loaded.source("no_gc")) == (64, True, "file")
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"settings\.json.*list"):
        settings.read_file(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"settings\.json.*JSON"):
        settings.read_file(path)
    with pytest.raises(ValueError, match=r"missing\.json"):
        settings.read_file(tmp_path / "missing.json")


def test_a_setting_describes_itself_with_its_source() -> None:
    loaded = Settings.load(environ={"NSA_FORCE_PARITY": "1"}, command_line={"seq_len": 8})
    assert loaded.describe("force_parity") == "NSA_FORCE_PARITY is on (environment)"
    assert loaded.describe("seq_len") == "NSA_SEQ_LEN is 8 (command line)"
    assert loaded.describe("batch_size") == "NSA_BATCH_SIZE is unset (default)"
    assert loaded.describe("tuned_tiles") == "NSA_TUNED_TILES is ~/.cache/nsa/tuned.json (default)"


def test_settings_travel_to_worker_processes() -> None:
    loaded = Settings.load(environ={"NSA_SEQ_LEN": "8"})
    assert copy.deepcopy(loaded) == loaded == pickle.loads(pickle.dumps(loaded))
    with pytest.raises(AttributeError):
        loaded.no_such_setting  # type: ignore[attr-defined]  # noqa: B018


def test_the_environment_is_read_once(environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    environment(NSA_SEQ_LEN="8")
    assert settings.current().seq_len == 8
    monkeypatch.setenv("NSA_SEQ_LEN", "16")
    assert settings.current().seq_len == 8


def test_setting_claims_an_effect_exactly_when_code_reads_it() -> None:
    """`nsa doctor` says "no effect yet" where `needs` is missing: that must be true, and so must the contrary."""
    root = Path(nsa.__file__).parent
    apart = {"settings.py", "doctor.py", "routing.py"}
    source = "\n".join(path.read_text() for path in root.rglob("*.py") if path.name not in apart)
    for setting in SETTINGS:
        if setting.needs in (settings.ROUTING, settings.FLASH):
            continue
        spec = find_spec(setting.needs) if find_spec(setting.needs.rpartition(".")[0]) else None
        # By attribute, or by name in the trainer's table of them.
        read = re.search(rf'(settings\.current\(\)|env|config|settings)\.{setting.name}\b|"{setting.name}": "', source)
        assert bool(spec) == bool(read), f"{setting.name}: needs {setting.needs}, read in the code: {bool(read)}"


def test_invalid_setting_value_is_rejected_from_any_source() -> None:
    with pytest.raises(ValueError, match="force_parity is 'no'"):
        Settings(force_parity="no")
    with pytest.raises(ValueError, match=r"file is \['a'\]"):
        Settings.load(environ={}, file=["a"])
