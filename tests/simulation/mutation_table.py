"""Mended bugs of order, liveness, ownership and interruption, and the edits that undo each: see mutations.py."""

from typing import NamedTuple

CHECKED = "flatparam/fsdp/desync/checked_collectives.py"
LIVENESS = "flatparam/fsdp/desync/liveness.py"
TRACE = "flatparam/fsdp/desync/trace.py"
BOARD = "csrc/desync/fp_board.cpp"
RENDEZVOUS = "flatparam/checkpoint/rendezvous.py"
EPOCHS = "flatparam/elastic/epochs.py"
TRAINING = "flatparam/elastic/training.py"
ELASTIC = "tests/simulation/test_simulated_elastic.py"
LATE = "tests/simulation/test_simulated_late_ranks.py"
FAULTS = "tests/simulation/test_simulated_faults.py"
FAILED = "tests/fsdp/desync/test_fsdp_failed_calls.py"
INTERRUPTED = "tests/fsdp/desync/test_fsdp_interrupted_collectives.py"

# True of programs in which such a fault strikes
MACHINES = "program['machines']"
GONE = "[each['kind'] for each in program['faults']] == ['is killed'] and program['host'] is None"
CATCHES = "program['catches']"
EARLY = "any(each['point'] < 30 and 'user' not in each['kind'] for each in program['faults'])"
LONG = "any(each['kind'] == 'is late' and each['seconds'] > 5 for each in program['faults'])"


class Mutation(NamedTuple):
    name: str
    commit: str  # which mended it
    broken: str  # what went wrong
    edits: tuple[tuple[str, str, str], ...]  # file, the mended text, which is there once, and the text in its place
    only: str = "program['faults']"  # true of each program that can show it, to save time
    kind: str = ""  # of the programs, as in `draw`
    test: str = ""  # a test file, or a test in one, to run in place of random programs


MUTATIONS = (
    Mutation(
        "unheard rank",
        "ba6e933",
        "a save waited for ever for a rank that was lost before it had answered a call",
        (
            (
                LIVENESS,
                """\
            if absent := ours.absent(rank for rank, key in key_of.items() if not store.check([key])):
                raise OrderError(absent)
""",
                "",
            ),
        ),
        test="tests/simulation/test_simulated_disk.py::"
        "test_a_save_does_not_wait_for_ever_for_a_rank_that_never_answered",
    ),
    Mutation(
        "world counted twice",
        "ba6e933",
        "Ctrl-C in a rank's first call counted its world twice, and the others could not read its posts",
        (
            (
                LIVENESS,
                "        number = _counting.setdefault(world, str(int(store.value_at(key) or 0) + 1))\n"
                "        store.set(key, number)\n",
                "        number = str(store.add(key, 1))\n",
            ),
        ),
        test="tests/fsdp/desync/test_board.py::test_ctrl_c_in_the_first_call_counts_a_world_once",
    ),
    Mutation(
        "readers in another group",
        "ba6e933",
        "ranks that heard in one group of a lost rank waited for its reading in another one",
        ((LIVENESS, "        self.native.look(0.0, False)  # the caller", "        # the caller"),),
        test="tests/simulation/test_simulated_programs.py::test_what_programs_have_found",
    ),
    Mutation(
        "ended readers",
        "ba6e933",
        "a rank that ended waited until ranks had read that had ended on its machine",
        ((LIVENESS, "others = self._size - 1 - self.native.ended()", "others = self._size - 1"),),
        GONE,
    ),
    Mutation(
        "refused collective",
        "83f2718",
        "a collective of a setup that torch refused to begin raised gloo's text",
        (
            (CHECKED, "with explaining_over(group):", "with contextlib.nullcontext():"),
            (CHECKED, "with explaining_over(group, look_of(group, traces=traces)):", "with contextlib.nullcontext():"),
        ),
        test=f"{FAULTS}::test_a_collective_that_cannot_begin_is_explained",
    ),
    Mutation(
        "destroyed world",
        "75f86dd",
        "an exception after the end of the process group was replaced by torch's ValueError",
        ((CHECKED, " for group in part.groups if group in all_groups()}", " for group in part.groups}"),),
        test=f"{FAILED}::test_an_exception_after_the_process_group_stays_as_it_is",
    ),
    Mutation(
        "two lost ranks",
        "d09cd91",
        "of two ranks that were lost at one moment the others named one or the other",
        (
            (
                CHECKED,
                """\
            if found:
                for each in traces:  # of several lost ranks all ranks name the same one
                    each.break_for(found)
""",
                "",
            ),
        ),
        test=f"{FAULTS}::test_of_two_lost_ranks_a_late_rank_names_the_one_that_is_named",
    ),
    Mutation(
        "rank that does not come",
        "7df2c37",
        "a live rank that did not come to a collective of a setup was not named",
        (
            (
                CHECKED,
                "explaining(functools.partial(_raise_reason, group, look or look_of(group), time.monotonic()))\n",
                "explaining(lambda message: (look or look_of(group))(has_failed=True))\n",
            ),
        ),
        test=f"{LATE}::test_ranks_that_do_not_come_are_named",
    ),
    Mutation(
        "report of another rank",
        "113217c",
        "a rank that went on withdrew the reports of other worlds in its process",
        (
            (
                CHECKED,
                "[trace for trace in troubled if trace.world() in (None, world)] if troubled else ():",
                "list(troubled):",
            ),
        ),
        test="tests/fsdp/desync/test_thread_ranks.py::test_a_rank_that_goes_on_withdraws_no_report_of_another",
    ),
    Mutation(
        "unrecorded meeting",
        "8026ef7",
        "a rank that saved while others ran the model was told at the time-out",
        (
            (
                RENDEZVOUS,
                "self._traces = note_meeting(call, parts, self.ranks)",
                "self._traces = []",
            ),
        ),
        CATCHES,
    ),
    Mutation(
        "other machine",
        "0f75b70",
        "a rank of another machine that had answered no call was not known",
        (
            (
                BOARD,
                ' ||\n                            !value_at(*posts_, key("member ", rank)).empty();',
                ";",
            ),
        ),
        MACHINES,
    ),
    Mutation(
        "short stop",
        "2c2a94c",
        "a rank that was stopped for less than the heartbeat was taken for lost",
        (
            (BOARD, "constexpr double share = 0.2; ", "constexpr double share = 0.4; "),
            (BOARD, "asked_->has_waited(beat_)", "asked_->has_waited(share * beat_)"),
        ),
        LONG,
    ),
    Mutation(
        "backward that a rank catches",
        "e535b99",
        "an exception that ended a backward on one rank alone was told at the time-out",
        (
            (
                "flatparam/fsdp/interop/backward_inputs.py",
                "            _tell(outputs, error)\n            raise\n",
                "            raise\n",
            ),
        ),
        CATCHES,
    ),
    Mutation(
        "forward that a rank catches",
        "80414a0",
        "an exception that ended a forward on one rank alone was told at the time-out",
        (("flatparam/fsdp/wrapper/forward.py", "            _tell_trouble(wrapper, error)\n", ""),),
        CATCHES,
    ),
    Mutation(
        "exception in another step",
        "effdd5c",
        "an exception in one step was told at the time-out to ranks that waited in a later step",
        ((TRACE, "self._raised < raised:", "self._raised < raised and self.core.passes <= raised[0]:"),),
        CATCHES,
    ),
    Mutation(
        "exception before a setup",
        "effdd5c",
        "ranks that waited in a collective that no trace records were told of an exception at the time-out",
        ((CHECKED, "            _raise_if_troubled(group, waited)\n            found", "            found"),),
        test=f"{LATE}::test_a_rank_that_has_raised_in_an_unpickled_model_is_told_to_those_who_build",
    ),
    Mutation(
        "second exception in a step",
        "732fb91",
        "a rank that raised again in a step in which all had raised was taken for a slow one",
        ((TRACE, "(step, self._raised[1] + 1 if self._raised[0] == step else 1)", "(step, 1)"),),
        f"{CATCHES} and 'raise' in str(program['phases'][-1])",
    ),
    Mutation(
        "reports of two ranks",
        "732fb91",
        "a rank that came back withdrew the report of another one",
        ((TRACE, "[each for each in found.split(_NEXT) if each and each != old]", "[]"),),
        CATCHES,
    ),
    Mutation(
        "missed collectives",
        "afd2b53",
        "a rank that an exception had kept from a collective met the others in another one",
        (
            (
                TRACE,
                "                self._settle(*self.core.missed, mine)\n",
                "                self.core.confirm_not_begun()\n",
            ),
        ),
        test=f"{INTERRUPTED}::test_so_they_are_where_the_device_waits",
    ),
    Mutation(
        "come to or begun",
        "c1bd3b6",
        "ranks that had failed alike were told that they differ",
        (
            (
                "csrc/desync/fp_watch.cpp",
                'value_at(*store_, pending + "/kept").empty() && fp_trace_has_begun(trace_, std::stoll(pending))',
                'value_at(*store_, pending + "/kept").empty()',
            ),
            (TRACE, "if self.core.has_begun(int(index)) and (kept", "if (kept"),
        ),
        test=f"{INTERRUPTED}::test_so_they_do_where_the_device_waits",
    ),
    Mutation(
        "last verdict",
        "1fe49c9",
        "rank 0 ended with the store before the others had read that the save was complete",
        ((RENDEZVOUS, "if is_last or answer[0] is not None:", "if False:"),),
        "program['host'] == 0",
    ),
    Mutation(
        "rank before its first unit",
        "d679042",
        "a rank was not known before it came to its first unit",
        (
            (
                LIVENESS,
                "    if pg is not None and watching_worlds.is_in_force:\n        _appear()\n",
                "",
            ),
        ),
        EARLY,
    ),
    Mutation(
        "ranks that leave",
        "49fd018",
        "live ranks that waited in a world were told late that the others had left it, and were taken for lost",
        (
            (
                TRAINING,
                """\
        board = liveness.board()
        if board is not None:
            board.leave("a rank was lost, or joins")
""",
                "",
            ),
        ),
        test="tests/simulation/test_simulated_elastic.py::test_devices_do_not_wait_for_a_rank_that_has_left",
    ),
    Mutation(
        "names of groups",
        "1399432",
        "the names of groups parted after a world that was not made",
        (
            (
                "flatparam/fsdp/desync/stores.py",
                "    dist.distributed_c10d._world.group_count = 0\n",
                "    pass\n",
            ),
        ),
        kind="elastic",
    ),
    Mutation(
        "all killed",
        "1399432",
        "a new process waited for ever where all ranks were killed",
        (
            (
                EPOCHS,
                "            if len(self.ended(epoch.members)) == len(epoch.members):\n",
                "            if False:\n",
            ),
        ),
        kind="elastic",
    ),
    Mutation(
        "patience without the heartbeat",
        "1399432",
        "a member that was late for less than the heartbeat was taken for lost",
        (
            (
                EPOCHS,
                "(heartbeat() or math.inf) + PATIENCE if epoch.number",
                "PATIENCE if epoch.number",
            ),
        ),
        test="tests/elastic/test_epochs.py::test_a_late_member_is_waited_for",
    ),
    Mutation(
        "state before the first step",
        "1399432",
        "a loss in each of two groups, or in a growth, lost the state",
        (
            (
                TRAINING,
                "one.key <= found.key",
                "one.key == found.key",
            ),
        ),
        test=f"{ELASTIC}::test_a_rank_that_is_killed_after_a_failed_world_costs_one_more_step",
    ),
    Mutation(
        "end of others",
        "4f180a6",
        "a rank that was replaced took the end of the others for its own, with other values",
        ((TRAINING, "if is_end and self.epochs.after(self.epoch) is None:", "if is_end:"),),
        test=ELASTIC,
    ),
    Mutation(
        "copy that is rebuilt in vain",
        "9f8528b",
        "one rank alone raised when it rebuilt a copy from corrupt pieces",
        (
            (
                TRAINING,
                'problem = f"{error}, when it is rebuilt from what the others keep"',
                "raise",
            ),
        ),
        test=ELASTIC,
    ),
    Mutation(
        "copies without end",
        "acfdc26",
        "a rank kept a copy more for each loss",
        ((TRAINING, "if one.key <= found.key][-2:]", "if one.key <= found.key]"),),
        test=f"{ELASTIC}::test_worlds_that_fail_one_after_another_keep_no_copy_more",
    ),
    Mutation(
        "hooks of all worlds",
        "f94a3fb",
        "a rank that had had several worlds printed an error with one prefix for each",
        ((TRAINING, "            if self._has_hook:\n                sys.excepthook = hook\n", ""),),
        test="tests/elastic/test_worlds.py",
    ),
    Mutation(
        "rank that does not start",
        "bcfa5ef",
        "the ranks of an elastic job waited for ever for one that did not start",
        ((EPOCHS, "PATIENCE if epoch.number else self._time_out", "PATIENCE if epoch.number else math.inf"),),
        test="tests/elastic/test_epochs.py",
    ),
    Mutation(
        "error in a resize",
        "6c4b448",
        "a rank with an error of its own left a resize, and the others waited for it",
        (("flatparam/elastic/transport.py", "        problems.append(problem)\n", "        raise\n"),),
        test="tests/elastic/test_resize_interrupted.py",
    ),
    Mutation(
        "post without its text",
        "8f73658",
        "a rank that ended between the two writes of its post hid all later posts",
        (
            (
                BOARD,
                "    std::erase_if(unread_, [this](int64_t number) {\n",
                "    bool is_hidden = false;\n    std::erase_if(unread_, [this, &is_hidden](int64_t number) {\n",
            ),
            (
                BOARD,
                "        if (post.empty()) { /* its rank",
                "        if ((is_hidden |= post.empty())) { /* its rank",
            ),
        ),
        test="tests/fsdp/desync/test_board.py",
    ),
)
