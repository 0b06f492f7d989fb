"""The table of conformance: works, memory, arguments, sums, point to point, groups. Found with torch 2.13."""

from functools import partial

from tests.simulation import conformance_calls
from tests.simulation.conformance_words import (
    CLOSED_ITSELF,
    ENDS,
    INVALID_NUMEL,
    LOST,
    MOVING,
    NO_FUTURE,
    NO_MESH,
    NOT_RECEIVED,
    NOT_RECEIVED_OR_LOST,
    REST,
    SLICE_OVER,
    Row,
)

DTYPES = ("float32", "bfloat16", "float16", "int64", "uint8", "bool", "complex64")
SUMMED = ("float32", "bfloat16", "float16")

ROWS = (
    Row(
        "pending work, all_reduce",
        2,
        partial(conformance_calls.pending_work, "all_reduce"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[[3.0, 3.0, 3.0, 3.0]]",
            },
            {},
        ),
    ),
    Row(
        "pending work, all_gather_into_tensor",
        2,
        partial(conformance_calls.pending_work, "all_gather_into_tensor"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]",
            },
            {},
        ),
    ),
    Row(
        "pending work, all_gather",
        2,
        partial(conformance_calls.pending_work, "all_gather"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]",
            },
            {},
        ),
    ),
    Row(
        "pending work, reduce_scatter_tensor",
        2,
        partial(conformance_calls.pending_work, "reduce_scatter_tensor"),
        (
            {
                (
                    "pending is_completed",
                    "is_completed after that",
                    "ended is_completed",
                    "waited is_completed",
                ): "False",
                ("pending is_success", "ended is_success", "wait", "wait again"): "True",
                ("pending future", "ended future"): NO_FUTURE,
                "wait for 0.1 s": "True in time",
                "result": "raises, at once: RuntimeError: result() not implemented.",
            },
            {},
        ),
    ),
    Row(
        "pending work, broadcast from first",
        2,
        partial(conformance_calls.pending_work, "broadcast from first"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[[1.0, 1.0, 1.0, 1.0]]",
            },
            {},
        ),
    ),
    Row(
        "pending work, broadcast from last",
        2,
        partial(conformance_calls.pending_work, "broadcast from last"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[[2.0, 2.0, 2.0, 2.0]]",
            },
            {},
        ),
    ),
    Row(
        "pending work, barrier",
        2,
        partial(conformance_calls.pending_work, "barrier"),
        (
            {
                ("pending is_completed", "pending future", "is_completed after that"): "False",
                (
                    "pending is_success",
                    "ended is_completed",
                    "ended is_success",
                    "ended future",
                    "wait",
                    "waited is_completed",
                    "wait again",
                ): "True",
                "wait for 0.1 s": SLICE_OVER,
                "result": "[]",
            },
            {},
        ),
    ),
    Row(
        "failed work, all_reduce",
        2,
        partial(conformance_calls.failed_work, "all_reduce"),
        (
            {
                ("is_completed", "future", "waited is_completed"): "True",
                "is_success": "False",
                (
                    "wait for 0.1 s",
                    "wait",
                    "wait again",
                    "future.wait",
                ): "raises, at once: RuntimeError: [source] Timed out waiting #ms for recv operation to complete",
            },
            {},
        ),
    ),
    Row(
        "failed work, all_gather_into_tensor",
        2,
        partial(conformance_calls.failed_work, "all_gather_into_tensor"),
        (
            {
                ("is_completed", "future", "waited is_completed"): "True",
                "is_success": "False",
                (
                    "wait for 0.1 s",
                    "wait",
                    "wait again",
                    "future.wait",
                ): "raises, at once: RuntimeError: [source] Timed out waiting #ms for send operation to complete",
            },
            {},
        ),
    ),
    Row(
        "failed work, reduce_scatter_tensor",
        2,
        partial(conformance_calls.failed_work, "reduce_scatter_tensor"),
        (
            {
                ("is_completed", "waited is_completed"): "False",
                "is_success": "True",
                ("future", "future.wait"): NO_FUTURE,
                (
                    "wait for 0.1 s",
                    "wait",
                    "wait again",
                ): "raises, at once: RuntimeError: [source] Timed out waiting #ms for recv operation to complete",
            },
            {},
        ),
    ),
    Row(
        "many works",
        2,
        conformance_calls.many_works,
        ({"all": ["wait, at time-out: RuntimeError: Application timeout caused pair closure", NOT_RECEIVED]}, {}),
    ),
    Row("order of ends", 2, conformance_calls.order_of_ends, ({("in one group", "in two groups"): "False"},) * 2),
    Row("wait for the second", 2, conformance_calls.wait_for_second, ({"first is_completed": "True"},) * 2),
    Row(
        "complete at return",
        2,
        conformance_calls.complete_at_return,
        (
            {
                "all_reduce": "None [3.0, 3.0]",
                "all_gather_into_tensor": "None [1.0, 1.0, 2.0, 2.0]",
                "reduce_scatter_tensor": "None [2.0, 2.0]",
            },
            {
                "all_reduce": "None [3.0, 3.0]",
                "all_gather_into_tensor": "None [1.0, 1.0, 2.0, 2.0]",
                "reduce_scatter_tensor": "None [4.0, 4.0]",
            },
        ),
    ),
    Row(
        "when read, all_reduce",
        2,
        partial(conformance_calls.when_read, "all_reduce"),
        (
            {"before": "input [1.0] output [-1.0]", ("before the wait", "after"): "input [102.0] output [-1.0]"},
            {"after": "input [102.0] output [-1.0]"},
        ),
    ),
    Row(
        "when read, all_gather_into_tensor",
        2,
        partial(conformance_calls.when_read, "all_gather_into_tensor"),
        (
            {
                "before": "input [1.0] output [-1.0, -1.0]",
                ("before the wait", "after"): "input [100.0] output [1.0, 2.0]",
            },
            {"after": "input [2.0] output [1.0, 2.0]"},
        ),
    ),
    Row(
        "when read, all_gather",
        2,
        partial(conformance_calls.when_read, "all_gather"),
        (
            {
                "before": "input [1.0] output [-1.0, -1.0]",
                ("before the wait", "after"): "input [100.0] output [1.0, 2.0]",
            },
            {"after": "input [2.0] output [1.0, 2.0]"},
        ),
    ),
    Row(
        "when read, reduce_scatter_tensor",
        2,
        partial(conformance_calls.when_read, "reduce_scatter_tensor"),
        (
            {
                "before": "input [1.0, 1.0] output [-1.0]",
                "before the wait": "input [100.0, 100.0] output [-1.0]",
                "after": "input [100.0, 100.0] output [3.0]",
            },
            {"after": "input [2.0, 2.0] output [3.0]"},
        ),
    ),
    Row(
        "when read, broadcast from first",
        2,
        partial(conformance_calls.when_read, "broadcast from first"),
        (
            {"before": "input [1.0] output [-1.0]", ("before the wait", "after"): "input [100.0] output [-1.0]"},
            {"after": "input [100.0] output [-1.0]"},
        ),
    ),
    Row(
        "when read, broadcast from last",
        2,
        partial(conformance_calls.when_read, "broadcast from last"),
        (
            {"before": "input [1.0] output [-1.0]", ("before the wait", "after"): "input [2.0] output [-1.0]"},
            {"after": "input [2.0] output [-1.0]"},
        ),
    ),
    Row(
        "in place",
        2,
        conformance_calls.in_place,
        (
            {
                (
                    "all_gather_into_tensor from own place",
                    "all_gather_into_tensor from other place",
                ): "ends at once [1.0, 1.0, 2.0, 2.0]",
                "reduce_scatter_tensor into own place": "ends at once [3.0, 3.0, 1.0, 1.0]",
                "reduce_scatter_tensor into other place": "ends at once [1.0, 1.0, 3.0, 3.0]",
            },
            {
                (
                    "all_gather_into_tensor from own place",
                    "all_gather_into_tensor from other place",
                ): "ends at once [1.0, 1.0, 2.0, 2.0]",
                "reduce_scatter_tensor into own place": "ends at once [2.0, 2.0, 3.0, 3.0]",
                "reduce_scatter_tensor into other place": "ends at once [3.0, 3.0, 2.0, 2.0]",
            },
        ),
    ),
    Row(
        "strided",
        2,
        conformance_calls.strided,
        (
            {
                "all_gather_into_tensor": "ends at once [[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]",  # noqa: E501
                "all_reduce": "ends at once [3.0, 3.0, 3.0, 3.0]",
                "reduce_scatter_tensor": "ends at once [2.0, 2.0, 0.0, 0.0]",
                "broadcast": "ends at once [1.0, 1.0, 1.0, 1.0]",
            },
        )
        * 2,
    ),
    Row("empty", 2, partial(conformance_calls.empty, *MOVING), ({REST: (ENDS, ENDS)},) * 2),
    Row(
        "refused",
        2,
        conformance_calls.refused,
        (
            {
                (
                    "all_gather_into_tensor other numel",
                    "all_gather_into_tensor other shape",
                    "all_gather other numel",
                ): (INVALID_NUMEL, ENDS),
                "all_gather_into_tensor other dtype": (
                    "begin, at once: RuntimeError: ProcessGroupGloo::allgather: invalid tensor type at index # (expected TensorOpti",  # noqa: E501
                    ENDS,
                ),
                (
                    "all_gather_into_tensor meta",
                    "all_gather_into_tensor meta input",
                    "all_reduce meta",
                    "broadcast meta",
                ): (ENDS, ENDS),
                "all_gather one output": (
                    "begin, at once: RuntimeError: ProcessGroupGloo::allgather: invalid output tensor list at index # (expected len",  # noqa: E501
                    ENDS,
                ),
                "all_gather other dtype": (
                    "begin, at once: ValueError: Invalid usage of tensors with different dtypesFound torch.float# and  torch.int#",  # noqa: E501
                    ENDS,
                ),
                "reduce_scatter_tensor other numel": (
                    "begin, at once: RuntimeError: [rank#]:[F# #:#:#.# ProcessGroupGloo.cpp:#] Check failed: outputShape[#] * world",  # noqa: E501
                    ENDS,
                ),
                "reduce_scatter_tensor other dtype": (
                    "begin, at once: RuntimeError: [rank#]:[F# #:#:#.# ProcessGroupGloo.cpp:#] Check failed: outputTensors[i].dtype",  # noqa: E501
                    ENDS,
                ),
                "all_reduce no tensor": ("begin, at once: TypeError: Invalid function argument", ENDS),
                "all_reduce complex max": (
                    "begin, at once: ValueError: all_reduce does not support RedOpType.MAX on complex tensors",
                    ENDS,
                ),
                "all_reduce float band": (
                    "wait, at once: RuntimeError: Cannot use ReduceOp.BAND with non-integral dtype",
                    NOT_RECEIVED_OR_LOST,
                ),
                "all_reduce premul_sum": (
                    "wait, at once: RuntimeError: Cannot use ReduceOp.PREMUL_SUM with Gloo",
                    NOT_RECEIVED_OR_LOST,
                ),
                "broadcast from nobody": (
                    "begin, at once: RuntimeError: ProcessGroupGloo::broadcast: invalid root rank: #",
                    ENDS,
                ),
                "send not contiguous": ("begin, at once: RuntimeError: input tensor has to be contiguous", ENDS),
            },
            {
                (
                    "all_gather_into_tensor other numel",
                    "all_gather_into_tensor other dtype",
                    "all_gather_into_tensor other shape",
                    "all_gather_into_tensor meta",
                    "all_gather_into_tensor meta input",
                    "all_gather one output",
                    "all_gather other numel",
                    "all_gather other dtype",
                    "reduce_scatter_tensor other numel",
                    "reduce_scatter_tensor other dtype",
                    "all_reduce meta",
                    "all_reduce no tensor",
                    "all_reduce complex max",
                    "broadcast meta",
                    "broadcast from nobody",
                    "send not contiguous",
                ): ("-", ENDS),
                ("all_reduce float band", "all_reduce premul_sum"): ("-", NOT_RECEIVED_OR_LOST),
            },
        ),
    ),
    Row("group of others", 2, conformance_calls.group_of_others, ({"all_reduce": ENDS},) * 2),
    Row(
        "operation SUM",
        2,
        partial(conformance_calls.operations, "SUM", *DTYPES),
        (
            {
                (
                    "all_reduce float32",
                    "reduce_scatter_tensor float32",
                    "all_reduce bfloat16",
                    "reduce_scatter_tensor bfloat16",
                    "all_reduce float16",
                    "reduce_scatter_tensor float16",
                ): "ends at once [2.0, 2.0]",
                (
                    "all_reduce int64",
                    "reduce_scatter_tensor int64",
                    "all_reduce uint8",
                    "reduce_scatter_tensor uint8",
                ): "ends at once [2, 2]",
                ("all_reduce bool", "reduce_scatter_tensor bool"): "ends at once [True, True]",
                ("all_reduce complex64", "reduce_scatter_tensor complex64"): "ends at once [(2+0j), (2+0j)]",
            },
        )
        * 2,
    ),
    Row(
        "operation AVG",
        2,
        partial(conformance_calls.operations, "AVG", *DTYPES),
        (
            {
                (
                    "all_reduce float32",
                    "reduce_scatter_tensor float32",
                    "all_reduce bfloat16",
                    "reduce_scatter_tensor bfloat16",
                    "all_reduce float16",
                    "reduce_scatter_tensor float16",
                ): "ends at once [1.0, 1.0]",
                (
                    "all_reduce int64",
                    "reduce_scatter_tensor int64",
                ): "wait, at once: RuntimeError: result type Float can't be cast to the desired output type Long",
                (
                    "all_reduce uint8",
                    "reduce_scatter_tensor uint8",
                ): "wait, at once: RuntimeError: result type Float can't be cast to the desired output type Byte",
                (
                    "all_reduce bool",
                    "reduce_scatter_tensor bool",
                ): "wait, at once: RuntimeError: result type Float can't be cast to the desired output type Bool",
                ("all_reduce complex64", "reduce_scatter_tensor complex64"): "ends at once [(1+0j), (1+0j)]",
            },
        )
        * 2,
    ),
    Row(
        "operation BAND",
        2,
        partial(conformance_calls.operations, "BAND", *DTYPES),
        (
            {
                (
                    "all_reduce float32",
                    "reduce_scatter_tensor float32",
                    "all_reduce bfloat16",
                    "reduce_scatter_tensor bfloat16",
                    "all_reduce float16",
                    "reduce_scatter_tensor float16",
                ): "wait, at once: RuntimeError: Cannot use ReduceOp.BAND with non-integral dtype",
                (
                    "all_reduce int64",
                    "reduce_scatter_tensor int64",
                    "all_reduce uint8",
                    "reduce_scatter_tensor uint8",
                ): "ends at once [1, 1]",
                ("all_reduce bool", "reduce_scatter_tensor bool"): "ends at once [True, True]",
                "all_reduce complex64": "begin, at once: ValueError: all_reduce does not support RedOpType.BAND on complex tensors",  # noqa: E501
                "reduce_scatter_tensor complex64": "wait, at once: RuntimeError: all_reduce does not supporton complex tensors",  # noqa: E501
            },
        )
        * 2,
    ),
    Row(
        "sums, 2 ranks",
        2,
        partial(conformance_calls.sums, *SUMMED),
        (
            {
                (
                    "float32 agree",
                    "float32 all_reduce in order",
                    "float32 reduce_scatter_tensor like it",
                    "bfloat16 agree",
                    "bfloat16 all_reduce in order",
                    "bfloat16 reduce_scatter_tensor like it",
                    "float16 agree",
                    "float16 all_reduce in order",
                    "float16 reduce_scatter_tensor like it",
                ): "True"
            },
        )
        * 2,
    ),
    Row(
        "sums, 3 ranks",
        3,
        partial(conformance_calls.sums, *SUMMED),
        (
            {
                (
                    "float32 agree",
                    "float32 reduce_scatter_tensor like it",
                    "bfloat16 agree",
                    "bfloat16 reduce_scatter_tensor like it",
                    "float16 agree",
                    "float16 reduce_scatter_tensor like it",
                ): "True",
                ("float32 all_reduce in order", "bfloat16 all_reduce in order", "float16 all_reduce in order"): "False",
            },
        )
        * 3,
    ),
    Row(
        "sums, 4 ranks",
        4,
        partial(conformance_calls.sums, *SUMMED),
        (
            {
                (
                    "float32 agree",
                    "float32 reduce_scatter_tensor like it",
                    "bfloat16 agree",
                    "bfloat16 reduce_scatter_tensor like it",
                    "float16 agree",
                    "float16 reduce_scatter_tensor like it",
                ): "True",
                ("float32 all_reduce in order", "bfloat16 all_reduce in order", "float16 all_reduce in order"): "False",
            },
        )
        * 4,
    ),
    Row(
        "point to point",
        2,
        conformance_calls.point_to_point,
        (
            {"isend wait": "True", "send": "None", "next": LOST},
            {
                "pending is_completed": "False",
                "wait after the time-out": "True [1.0, 2.0]",
                ("waited is_completed", "wait for 0.1 s then"): "True",
                "is_completed when it has come": "False [11.0, 12.0]",
                "wait for 0.1 s for nothing": "raises, at once: RuntimeError: [source] Timed out waiting #ms for recv operation to complete",  # noqa: E501
                "next": CLOSED_ITSELF,
            },
        ),
    ),
    Row("tags", 2, conformance_calls.tags, ({"send": "None"}, {"from any": "0", "got": "[3.0, 1.0, 2.0]"})),
    Row(
        "new group alone, 2 ranks",
        2,
        conformance_calls.new_group_alone,
        (
            {
                "new_group": "begin, at time-out: DistStoreError: wait timeout after #ms, keys: /#//#//cpu//#/#",
                "next": ENDS,
            },
            {"new_group": NO_MESH, "next": ENDS},
        ),
    ),
    Row(
        "destroyed, 2 ranks",
        2,
        conformance_calls.destroyed,
        (
            {"then": ENDS, "forgotten": LOST},
            {
                "destroy": "None",
                "destroy again": "raises, at once: ValueError: Invalid process group specified",
                "then": ENDS,
            },
        ),
    ),
    Row(
        "new group alone, 3 ranks",
        3,
        conformance_calls.new_group_alone,
        (
            {
                "new_group": "begin, at time-out: DistStoreError: wait timeout after #ms, keys: /#//#//cpu//#/#",
                "next": ENDS,
            },
            {
                "new_group": "begin, at time-out: DistStoreError: wait timeout after #ms, keys: /#//#//cpu//#/#",
                "next": ENDS,
            },
            {"new_group": NO_MESH, "next": ENDS},
        ),
    ),
    Row(
        "destroyed, 3 ranks",
        3,
        conformance_calls.destroyed,
        (
            {"then": ENDS, "forgotten": LOST},
            {"then": ENDS, "forgotten": LOST},
            {
                "destroy": "None",
                "destroy again": "raises, at once: ValueError: Invalid process group specified",
                "then": ENDS,
            },
        ),
    ),
    Row(
        "aborted",
        2,
        conformance_calls.aborted,
        ({"next": LOST}, {"abort": "None", "pending": NOT_RECEIVED, "next": CLOSED_ITSELF}),
    ),
)
