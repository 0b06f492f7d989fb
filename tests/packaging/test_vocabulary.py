"""One name for each thing: a name that was replaced may not come back, in Python, C or C++."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

# What was replaced, by what replaced it
PYTHON = {
    "FlatParam": {"Segment", "segment", "by_segment", "segment_of"},
    "ParamInfo": {"Original"},
    "ShardSlice": {"Here"},
    "LocalParam": {"Held", "held_by"},
    "SteppedParam": {"Stepped"},
    "GroupTrace": {"sequence_of", "_sequences"},
    "CollectiveEvent": {"Post", "event_of", "post_of"},
    "SetupCollective": {"Exchange"},
    "UnitIds": {"Register", "register_of", "enroll", "enroll_loaded", "enroll_copy", "number_of", "number_of_part"},
    "HealthBoard": {"Board", "why_failed", "life_of_world"},
    "Rendezvous": {"Council", "council"},
    "has_secondary_shard": {"keeps_copy"},
    "accumulated": {"set_kept", "show_kept", "kept_bytes"},
    "sync_user_writes": {"look_over"},
    "write_back": {"take_back"},
    "alias_params": {"point_params"},
    "suspect": {"doubted"},
    "mismatched": {"why_apart", "check_not_apart"},
    "not_steppable": {"unfit"},
    "RefusingMarkers": {"Marks"},
    "known_to_torch": {"taught"},
    "core": {"make_step"},
}
C = {
    "fp_unit_ref": {"fp_params_ref"},
    "fp_unit_callbacks": {"fp_module_params_calls"},
    "outer_group": {"refresh_group"},
    "FP_TRACE_": {"FP_ORDER_\\w+"},
    "accumulated": {
        "kept_object",
        "kept_steps",
        "wanted_kept",
        "kept_first",
        "kept_in_no_sync",
        "\\w+_kept",
        "FP_SHOWN_SHOW_KEPT",
    },
    "frozen_share": {"owed"},
    "deferred_reduced": {"in_saved"},
    "reduce_slot": {"fp_turn_\\w+", "FP_TURN_\\w+"},
    "backward_section": {"begin_turn", "end_turn"},
    "sync_user_writes": {"\\w*look_over"},
    "alias": {"fp_torch_point\\w*", "fp_flat_param_point", "point_params"},
    "wait_device": {"fp_settle", "settle"},
    "suspect": {"doubted"},
    "not_steppable": {"unfit"},
    "PendingCollectives": {"Kept"},
    "WaitScope": {"Waiting"},
    "FirstCollective": {"Connecting"},
    "borrowed": {"lent", "is_lent"},
    "has_borrower": {"is_held"},
}


def names_of_python(file):
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def names_of_c(file):
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", file.read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b[A-Za-z_]\w*", code))


@pytest.mark.parametrize(
    ("files", "names_of", "replaced"),
    [
        (
            [*(ROOT / "flatparam" / "fsdp").rglob("*.py"), *(ROOT / "flatparam" / "checkpoint").rglob("*.py")],
            names_of_python,
            PYTHON,
        ),
        ([file for file in (ROOT / "csrc").rglob("*.[ch]*")], names_of_c, C),
    ],
    ids=["Python", "C"],
)
def test_no_name_that_was_replaced_comes_back(files, names_of, replaced):
    assert files
    old = {re.compile(name): new for new, names in replaced.items() for name in names}
    found = [
        f"{file.relative_to(ROOT)}: {name}, which is {new} now"
        for file in files
        for name in names_of(file)
        for pattern, new in old.items()
        if pattern.fullmatch(name)
    ]
    assert not found, "\n".join(found)


def test_each_name_is_in_the_glossary():
    lacking = [name for name in (*PYTHON, *C) if name.rstrip("_") not in GLOSSARY]
    assert not lacking, f"docs/glossary.md has no {', '.join(lacking)}"
