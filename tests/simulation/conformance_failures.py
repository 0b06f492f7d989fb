"""The table of conformance: a rank fails, is late, or does otherwise than the others. Found with torch 2.13.

Two ranks, unless the name says otherwise. A pair is the end of the collective, and that of an all-reduce after it in
the same group. ``others``: an all-reduce in a group without the rank that fails.
"""

from functools import partial

from tests.simulation import conformance
from tests.simulation.conformance_words import (
    ANY_END,
    BLOCKING,
    CLOSED_ITSELF,
    CLOSED_OR_LOST,
    DIED,
    ENDS,
    ENDS_LATE,
    ENDS_OR_LOST,
    LOST,
    LOST_AT_BEGIN,
    LOST_LATER,
    LOST_OR_LATE,
    LOST_SOON,
    MOST,
    MOVING,
    NOT_RECEIVED,
    NOT_RECEIVED_AT_BEGIN,
    NOT_RECEIVED_OR_LOST,
    NOT_SENT,
    NOT_SENT_AT_BEGIN,
    NOT_SENT_OR_LOST,
    PAIRS,
    RANK_FAILED,
    RANK_FAILED_AT_TIME_OUT,
    REST,
    STOPPED,
    Row,
)

ROWS = (
    Row(
        "killed before, 2 ranks",
        2,
        partial(conformance.killed_before, *MOST, *PAIRS, *BLOCKING),
        (
            {
                REST: (LOST, LOST),
                ("send to last", "receive from last", "all_gather_object", "monitored_barrier"): (LOST_AT_BEGIN, LOST),
            },
            DIED,
        ),
    ),
    Row(
        "closed before, 2 ranks",
        2,
        partial(conformance.closed_before, *MOST, *PAIRS, *BLOCKING),
        (
            {
                REST: (LOST, LOST),
                ("send to last", "receive from last", "all_gather_object", "monitored_barrier"): (LOST_AT_BEGIN, LOST),
            },
            {},
        ),
    ),
    Row(
        "killed after, 2 ranks",
        2,
        partial(conformance.killed_after, *MOST, *PAIRS, *BLOCKING),
        ({REST: (ENDS, LOST)}, DIED),
    ),
    Row("killed during, 2 ranks", 2, partial(conformance.killed_during, *MOST), ({REST: (LOST, LOST)}, DIED)),
    Row(
        "killed during, send to last, 2 ranks",
        2,
        partial(conformance.killed_during, "send to last"),
        ({"send to last": (LOST, LOST)}, DIED),
    ),
    Row(
        "killed during, receive from last, 2 ranks",
        2,
        partial(conformance.killed_during, "receive from last"),
        ({"receive from last": (LOST, LOST)}, DIED),
    ),
    Row(
        "killed during, all_gather_object, 2 ranks",
        2,
        partial(conformance.killed_during, "all_gather_object"),
        ({"all_gather_object": (LOST_AT_BEGIN, LOST)}, DIED),
    ),
    Row(
        "killed during, monitored_barrier, 2 ranks",
        2,
        partial(conformance.killed_during, "monitored_barrier"),
        ({"monitored_barrier": (RANK_FAILED, LOST)}, DIED),
    ),
    Row("closed during, 2 ranks", 2, partial(conformance.closed_during, *MOST), ({REST: (LOST_SOON, LOST)}, {})),
    Row(
        "closed during, send to last, 2 ranks",
        2,
        partial(conformance.closed_during, "send to last"),
        ({"send to last": (LOST_SOON, LOST)}, {}),
    ),
    Row(
        "closed during, receive from last, 2 ranks",
        2,
        partial(conformance.closed_during, "receive from last"),
        ({"receive from last": (LOST_SOON, LOST)}, {}),
    ),
    Row(
        "closed during, all_gather_object, 2 ranks",
        2,
        partial(conformance.closed_during, "all_gather_object"),
        ({"all_gather_object": (LOST_AT_BEGIN, LOST)}, {}),
    ),
    Row(
        "closed during, monitored_barrier, 2 ranks",
        2,
        partial(conformance.closed_during, "monitored_barrier"),
        ({"monitored_barrier": (RANK_FAILED, LOST)}, {}),
    ),
    Row(
        "never, 2 ranks",
        2,
        partial(conformance.never, *MOST),
        (
            {
                REST: (NOT_RECEIVED, CLOSED_ITSELF),
                ("all_gather_into_tensor", "all_gather", "broadcast from first", "scatter", "all_to_all_single"): (
                    NOT_SENT,
                    CLOSED_ITSELF,
                ),
            },
            {REST: (LOST, LOST)},
        ),
    ),
    Row(
        "never, send to last, 2 ranks",
        2,
        partial(conformance.never, "send to last"),
        ({"send to last": (NOT_SENT, CLOSED_ITSELF)}, {"send to last": (LOST_AT_BEGIN, LOST)}),
    ),
    Row(
        "never, receive from last, 2 ranks",
        2,
        partial(conformance.never, "receive from last"),
        ({"receive from last": (NOT_RECEIVED, CLOSED_ITSELF)}, {"receive from last": (LOST_AT_BEGIN, LOST)}),
    ),
    Row(
        "never, all_gather_object, 2 ranks",
        2,
        partial(conformance.never, "all_gather_object"),
        ({"all_gather_object": (NOT_SENT_AT_BEGIN, CLOSED_ITSELF)}, {"all_gather_object": (LOST_AT_BEGIN, LOST)}),
    ),
    Row(
        "never, monitored_barrier, 2 ranks",
        2,
        partial(conformance.never, "monitored_barrier"),
        ({"monitored_barrier": (RANK_FAILED_AT_TIME_OUT, CLOSED_ITSELF)}, {"monitored_barrier": (LOST_AT_BEGIN, LOST)}),
    ),
    Row("late, 2 ranks", 2, partial(conformance.late, *MOST), ({REST: (ENDS_LATE, ENDS)}, {REST: (ENDS, ENDS)})),
    Row(
        "late, send to last, 2 ranks",
        2,
        partial(conformance.late, "send to last"),
        ({"send to last": (ENDS_LATE, ENDS)}, {"send to last": (ENDS, ENDS)}),
    ),
    Row(
        "late, receive from last, 2 ranks",
        2,
        partial(conformance.late, "receive from last"),
        ({"receive from last": (ENDS_LATE, ENDS)}, {"receive from last": (ENDS, ENDS)}),
    ),
    Row(
        "late, all_gather_object, 2 ranks",
        2,
        partial(conformance.late, "all_gather_object"),
        ({"all_gather_object": (ENDS_LATE, ENDS)}, {"all_gather_object": (ENDS, ENDS)}),
    ),
    Row(
        "late, monitored_barrier, 2 ranks",
        2,
        partial(conformance.late, "monitored_barrier"),
        ({"monitored_barrier": (ENDS_LATE, ENDS)}, {"monitored_barrier": (ENDS, ENDS)}),
    ),
    Row(
        "stopped, 2 ranks",
        2,
        partial(conformance.stopped, *MOST),
        (
            {
                REST: (NOT_RECEIVED, CLOSED_ITSELF),
                ("all_gather_into_tensor", "all_gather", "broadcast from first", "scatter", "all_to_all_single"): (
                    NOT_SENT,
                    CLOSED_ITSELF,
                ),
            },
            STOPPED,
        ),
        processes=True,
    ),
    Row(
        "killed before, 3 ranks",
        3,
        partial(conformance.killed_before, *MOST, "all_gather_object"),
        (
            {REST: (LOST, LOST), "all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            {
                REST: (LOST_OR_LATE, CLOSED_OR_LOST),
                ("broadcast from first", "gather", "scatter"): (ANY_END, CLOSED_OR_LOST),
                "all_gather_object": (LOST_AT_BEGIN, LOST),
                "others": (ENDS,),
            },
            DIED,
        ),
    ),
    Row(
        "closed before, 3 ranks",
        3,
        partial(conformance.closed_before, *MOST, "all_gather_object"),
        (
            {REST: (LOST, LOST), "all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            {
                REST: (LOST_OR_LATE, CLOSED_OR_LOST),
                ("broadcast from first", "gather", "scatter"): (ANY_END, CLOSED_OR_LOST),
                "all_gather_object": (LOST_AT_BEGIN, LOST),
                "others": (ENDS,),
            },
            {},
        ),
    ),
    Row(
        "killed after, 3 ranks",
        3,
        partial(conformance.killed_after, *MOST),
        ({REST: (ENDS, LOST), "others": (ENDS,)}, {REST: (ENDS, LOST), "others": (ENDS,)}, DIED),
    ),
    Row(
        "killed during, 3 ranks",
        3,
        partial(conformance.killed_during, *MOST),
        (
            {REST: (LOST, LOST), "others": (ENDS,)},
            {
                REST: (LOST_OR_LATE, CLOSED_OR_LOST),
                ("broadcast from first", "gather", "scatter"): (ANY_END, CLOSED_OR_LOST),
                "others": (ENDS,),
            },
            DIED,
        ),
    ),
    Row(
        "killed during, all_gather_object, 3 ranks",
        3,
        partial(conformance.killed_during, "all_gather_object"),
        (
            {"all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            {"all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            DIED,
        ),
    ),
    Row(
        "closed during, 3 ranks",
        3,
        partial(conformance.closed_during, *MOST),
        (
            {REST: (LOST_SOON, LOST), "others": (ENDS,)},
            {
                REST: (LOST_OR_LATE, CLOSED_OR_LOST),
                ("broadcast from first", "gather", "scatter"): (ANY_END, CLOSED_OR_LOST),
                "others": (ENDS,),
            },
            {},
        ),
    ),
    Row(
        "closed during, all_gather_object, 3 ranks",
        3,
        partial(conformance.closed_during, "all_gather_object"),
        (
            {"all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            {"all_gather_object": (LOST_AT_BEGIN, LOST), "others": (ENDS,)},
            {},
        ),
    ),
    Row(
        "never, 3 ranks",
        3,
        partial(conformance.never, *MOST),
        (
            {
                REST: (NOT_SENT_OR_LOST, CLOSED_OR_LOST),
                ("all_gather_into_tensor", "all_gather", "broadcast from last", "gather", "barrier"): (
                    NOT_RECEIVED_OR_LOST,
                    CLOSED_OR_LOST,
                ),
                "others": (ENDS,),
            },
            {
                REST: (NOT_RECEIVED_OR_LOST, CLOSED_OR_LOST),
                ("all_gather_into_tensor", "all_gather", "all_to_all_single", "barrier"): (
                    NOT_SENT_OR_LOST,
                    CLOSED_OR_LOST,
                ),
                ("broadcast from first", "gather", "scatter"): (ENDS, NOT_RECEIVED_OR_LOST),
                "others": (ENDS,),
            },
            {REST: (LOST, LOST)},
        ),
    ),
    Row(
        "never, all_gather_object, 3 ranks",
        3,
        partial(conformance.never, "all_gather_object"),
        (
            {"all_gather_object": (NOT_RECEIVED_AT_BEGIN, CLOSED_OR_LOST), "others": (ENDS,)},
            {"all_gather_object": (NOT_SENT_AT_BEGIN, CLOSED_OR_LOST), "others": (ENDS,)},
            {"all_gather_object": (LOST_AT_BEGIN, LOST)},
        ),
    ),
    Row(
        "late, 3 ranks",
        3,
        partial(conformance.late, *MOST),
        (
            {REST: (ENDS_LATE, ENDS), "others": (ENDS,)},
            {REST: (ENDS_LATE, ENDS), ("broadcast from first", "gather", "scatter"): (ENDS, ENDS), "others": (ENDS,)},
            {REST: (ENDS, ENDS)},
        ),
    ),
    Row(
        "late, all_gather_object, 3 ranks",
        3,
        partial(conformance.late, "all_gather_object"),
        (
            {"all_gather_object": (ENDS_LATE, ENDS), "others": (ENDS,)},
            {"all_gather_object": (ENDS_LATE, ENDS), "others": (ENDS,)},
            {"all_gather_object": (ENDS, ENDS)},
        ),
    ),
    Row(
        "stopped, 3 ranks",
        3,
        partial(conformance.stopped, *MOST),
        (
            {
                REST: (NOT_SENT_OR_LOST, CLOSED_OR_LOST),
                ("all_gather_into_tensor", "all_gather", "broadcast from last", "gather", "barrier"): (
                    NOT_RECEIVED_OR_LOST,
                    CLOSED_OR_LOST,
                ),
                "others": (ENDS,),
            },
            {
                REST: (NOT_RECEIVED_OR_LOST, CLOSED_OR_LOST),
                ("all_gather_into_tensor", "all_gather", "all_to_all_single", "barrier"): (
                    NOT_SENT_OR_LOST,
                    CLOSED_OR_LOST,
                ),
                ("broadcast from first", "gather", "scatter"): (ENDS, NOT_RECEIVED_OR_LOST),
                "others": (ENDS,),
            },
            STOPPED,
        ),
        processes=True,
    ),
    Row(
        "killed amid data",
        2,
        partial(conformance.killed_amid, *MOST, *PAIRS),
        ({REST: (LOST, LOST), PAIRS: (LOST_AT_BEGIN, LOST)}, DIED),
    ),
    Row(
        "fewer elements, all_reduce",
        2,
        partial(conformance.other_numel, 2, "all_reduce"),
        ({REST: (NOT_RECEIVED, CLOSED_ITSELF)}, {REST: (ENDS, LOST_LATER)}),
    ),
    Row(
        "more elements, all_reduce", 2, partial(conformance.other_numel, 8, "all_reduce"), (DIED, {REST: (LOST, LOST)})
    ),
    Row(
        "fewer elements, all_gather_into_tensor",
        2,
        partial(conformance.other_numel, 2, "all_gather_into_tensor"),
        ({REST: (ENDS_OR_LOST, LOST)}, DIED),
    ),
    Row(
        "more elements, all_gather_into_tensor",
        2,
        partial(conformance.other_numel, 8, "all_gather_into_tensor"),
        (DIED, {REST: (ENDS_OR_LOST, LOST)}),
    ),
    Row(
        "fewer elements, all_gather",
        2,
        partial(conformance.other_numel, 2, "all_gather"),
        ({REST: (ENDS_OR_LOST, LOST)}, DIED),
    ),
    Row(
        "more elements, all_gather",
        2,
        partial(conformance.other_numel, 8, "all_gather"),
        (DIED, {REST: (ENDS_OR_LOST, LOST)}),
    ),
    Row(
        "fewer elements, reduce_scatter_tensor",
        2,
        partial(conformance.other_numel, 2, "reduce_scatter_tensor"),
        ({REST: (LOST, LOST)}, DIED),
    ),
    Row(
        "more elements, reduce_scatter_tensor",
        2,
        partial(conformance.other_numel, 8, "reduce_scatter_tensor"),
        (DIED, {REST: (LOST, LOST)}),
    ),
    Row(
        "fewer elements, broadcast from first",
        2,
        partial(conformance.other_numel, 2, "broadcast from first"),
        ({REST: (ENDS, LOST)}, DIED),
    ),
    Row(
        "more elements, broadcast from first",
        2,
        partial(conformance.other_numel, 8, "broadcast from first"),
        ({REST: (ENDS, ENDS)},) * 2,
    ),
    Row(
        "fewer elements, broadcast from last",
        2,
        partial(conformance.other_numel, 2, "broadcast from last"),
        ({REST: (ENDS, ENDS)},) * 2,
    ),
    Row(
        "more elements, broadcast from last",
        2,
        partial(conformance.other_numel, 8, "broadcast from last"),
        (DIED, {REST: (ENDS, LOST)}),
    ),
    Row(
        "fewer elements, send to last",
        2,
        partial(conformance.other_numel, 2, "send to last"),
        ({REST: (ENDS, LOST)}, DIED),
    ),
    Row(
        "more elements, send to last",
        2,
        partial(conformance.other_numel, 8, "send to last"),
        ({REST: (ENDS, ENDS)},) * 2,
    ),
    Row(
        "fewer elements, receive from last",
        2,
        partial(conformance.other_numel, 2, "receive from last"),
        ({REST: (ENDS, ENDS)},) * 2,
    ),
    Row(
        "more elements, receive from last",
        2,
        partial(conformance.other_numel, 8, "receive from last"),
        (DIED, {REST: (ENDS, LOST)}),
    ),
    Row("other dtype", 2, partial(conformance.other_dtype, "int32", *MOVING), ({REST: (ENDS, ENDS)},) * 2),
    Row(
        "other collective",
        2,
        partial(
            conformance.other_collective,
            "all_reduce | all_reduce max",
            "all_reduce | all_gather_into_tensor",
            "all_reduce | broadcast from first",
            "all_reduce | barrier",
            "all_gather_into_tensor | reduce_scatter_tensor",
            "all_gather_into_tensor | all_gather",
            "all_gather_into_tensor | barrier",
            "reduce_scatter_tensor | barrier",
            "reduce_scatter_tensor | broadcast from first",
            "broadcast from first | broadcast from last",
            "broadcast from first | all_reduce",
            "all_gather_into_tensor | all_reduce",
        ),
        (
            {
                ("all_reduce | all_reduce max", "all_gather_into_tensor | all_gather"): (ENDS, ENDS),
                REST: (NOT_RECEIVED_OR_LOST, CLOSED_OR_LOST),
                (
                    "all_gather_into_tensor | reduce_scatter_tensor",
                    "all_gather_into_tensor | barrier",
                    "broadcast from first | broadcast from last",
                    "broadcast from first | all_reduce",
                    "all_gather_into_tensor | all_reduce",
                ): (NOT_SENT_OR_LOST, CLOSED_OR_LOST),
            },
            {
                ("all_reduce | all_reduce max", "all_gather_into_tensor | all_gather"): (ENDS, ENDS),
                ("all_reduce | all_gather_into_tensor", "broadcast from first | broadcast from last"): (
                    NOT_SENT_OR_LOST,
                    CLOSED_OR_LOST,
                ),
                REST: (NOT_RECEIVED_OR_LOST, CLOSED_OR_LOST),
            },
        ),
    ),
    Row(
        "all_reduce and reduce_scatter_tensor",
        2,
        partial(conformance.other_collective, "all_reduce | reduce_scatter_tensor"),
        (DIED, {"all_reduce | reduce_scatter_tensor": (LOST, LOST)}),
    ),
)
