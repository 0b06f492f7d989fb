/* core/fp_boxes.c -- the staircase of a range, or a smaller tiling, found by exact search.
 *
 * The grid is first made small: only the order of a coordinate to those of the range's ends matters, so each dimension
 * has at most 5 classes of coordinates, and the smallest tiling of the classes is as small as that of the grid (leave
 * out all but one coordinate of each class, and a tiling of the grid is one of the classes).
 *
 * The bound. Call the least elements after `first` at each level heads: first itself, and (first[0..i), first[i] + 1,
 * 0, ...). A box inside the range that holds a head has it as its least corner, so no box holds two; the same for
 * tails, from `last`. A tiling thus has at least heads + tails boxes, less those that hold one of each, and these span
 * all from head to tail: at least heads + tails - the most such spans that are disjoint.
 *
 * The search always looks at the first or the last cell that is free. It is a corner of its box. Unless it is a head or
 * tail itself, or the bound leaves a box over, its box must end in a tail or head: few choices. */
#include "core/fp_boxes.h"

#include <stdlib.h>

#include "core/fp_alloc.h"

/* A range that is not empty, by the coordinates of its first and last element. Dimensions [0, from) are those in which
 * the two agree, dimensions [to, ndim) those below both levels, in which every box is complete. */
typedef struct {
    size_t ndim;
    const int64_t *shape;
    int64_t first[FP_MAX_DIMS];
    int64_t last[FP_MAX_DIMS];
    size_t from, to;
    size_t first_level; /* the last dimension in which first is not 0, at least from */
    size_t last_level;  /* the last dimension in which last is not at its maximum, at least from */
} grid_range;

/* Where boxes go: the caller's arrays. */
typedef struct {
    size_t ndim;
    int64_t *offsets, *sizes;
    size_t count;
} box_list;

static void
coordinates(int64_t element, const int64_t *shape, size_t ndim, int64_t *out)
{
    for (size_t d = ndim; d-- > 0;) {
        out[d] = element % shape[d];
        element /= shape[d];
    }
}

static void
describe(grid_range *range, const int64_t *shape, size_t ndim, int64_t begin, int64_t end)
{
    range->ndim = ndim;
    range->shape = shape;
    coordinates(begin, shape, ndim, range->first);
    coordinates(end - 1, shape, ndim, range->last);
    range->from = 0;
    while (range->from < ndim && range->first[range->from] == range->last[range->from]) {
        range->from++;
    }
    range->first_level = range->last_level = range->from;
    for (size_t d = range->from; d < ndim; d++) {
        if (range->first[d] != 0) {
            range->first_level = d;
        }
        if (range->last[d] != shape[d] - 1) {
            range->last_level = d;
        }
    }
    const size_t level = range->first_level > range->last_level ? range->first_level : range->last_level;
    range->to = level < ndim ? level + 1 : ndim;
}

/* Append the box that equals `at` above level, is [low, high) there and complete below; nothing if it is empty. */
static void
add_box(box_list *list, const grid_range *range, const int64_t *at, size_t level, int64_t low, int64_t high)
{
    int64_t *offset = list->offsets + list->count * list->ndim, *size = list->sizes + list->count * list->ndim;
    if (low >= high) {
        return;
    }
    for (size_t d = 0; d < list->ndim; d++) {
        offset[d] = d < level ? at[d] : d == level ? low : 0;
        size[d] = d < level ? 1 : d == level ? high - low : range->shape[d];
    }
    list->count++;
}

/* One box for each level between the first element and a full slab, one for the slabs, one for each level back down. */
static void
add_staircase(box_list *list, const grid_range *range)
{
    const size_t from = range->from;
    for (size_t d = range->first_level; d > from; d--) {
        add_box(list, range, range->first, d, range->first[d] + (d < range->first_level), range->shape[d]);
    }
    add_box(list, range, range->first, from, range->first[from] + (range->first_level > from),
            range->last[from] + 1 - (range->last_level > from));
    for (size_t d = from + 1; d <= range->last_level; d++) {
        add_box(list, range, range->last, d, 0, range->last[d] + (d == range->last_level));
    }
}

/* ---- the search ---- */

/* What it takes on: ranges that cross up to DIMS dimensions, and how many cells it visits before it gives up (about 20 ms). */
enum { DIMS = 5, MOST_BOXES = 2 * DIMS - 1, MOST_WORK = 4000000 };

/* Classes: at most 3 in the first dimension (the range lies between its ends), 5 in the others, 3 in the last. */
enum { MOST_CLASSES = 5, MOST_CELLS = 3 * 5 * 5 * 5 * 3, MOST_SPANS = DIMS * DIMS };
enum { FREE = 0, USED = 1 };
enum { IS_HEAD = 1, IS_TAIL = 2 };

typedef struct {
    int ndim;
    int classes[DIMS];                    /* how many */
    int64_t cuts[DIMS][MOST_CLASSES + 1]; /* class c of dimension d is [cuts[d][c], cuts[d][c + 1]) */
    int strides[DIMS];
    int first, last; /* cells are numbered in lexicographic order; the range is [first, last] */
    int num_ends, num_spans;
    struct {
        int cell;
        int direction; /* of its boxes: 1 for a head, -1 for a tail */
    } ends[2 * DIMS];
    int span_head[MOST_SPANS], span_tail[MOST_SPANS]; /* cells */
    uint32_t span_clash[MOST_SPANS];                  /* bit t: spans s and t share a cell */
    int lower[MOST_BOXES], upper[MOST_BOXES];         /* corner cells of the boxes placed so far */
    int64_t work;                                     /* cells that may still be visited before giving up */
    unsigned char coordinates[MOST_CELLS][DIMS];
    unsigned char used[MOST_CELLS];
    unsigned char marks[MOST_CELLS];             /* IS_HEAD, IS_TAIL */
    unsigned char fits[MOST_CELLS];              /* scratch of list_free_boxes */
    uint32_t choices[MOST_BOXES][2][MOST_CELLS]; /* for each depth and direction: volume << 16 | corner */
} tiling;

static int
coordinate(const tiling *t, int cell, int d)
{
    return t->coordinates[cell][d];
}

/* Insert cut into the ascending list, unless it is there or not inside (low, high). */
static int
add_cut(int64_t *cuts, int n, int64_t cut, int64_t high)
{
    int at = n;
    while (at > 0 && cuts[at - 1] > cut) {
        at--;
    }
    if (at == 0 || cuts[at - 1] == cut || cut >= high) {
        return n;
    }
    for (int i = n; i > at; i--) {
        cuts[i] = cuts[i - 1];
    }
    cuts[at] = cut;
    return n + 1;
}

/* Fill classes, cuts and strides. At a level above an end's own a coordinate may be less than, equal to or greater than
 * the end's; at the level itself the end is included; below it no coordinate matters. */
static void
make_classes(tiling *t, const grid_range *range)
{
    int stride = 1;
    t->ndim = (int)(range->to - range->from);
    for (size_t d = range->to; d-- > range->from;) {
        const size_t at = d - range->from;
        const int64_t high = at == 0 ? range->last[d] + 1 : range->shape[d];
        int64_t *cuts = t->cuts[at];
        int n = 1;
        cuts[0] = at == 0 ? range->first[d] : 0;
        if (d <= range->first_level) {
            n = add_cut(cuts, n, range->first[d], high);
        }
        if (d < range->first_level) {
            n = add_cut(cuts, n, range->first[d] + 1, high);
        }
        if (d <= range->last_level) {
            n = add_cut(cuts, n, range->last[d] + 1, high);
        }
        if (d < range->last_level) {
            n = add_cut(cuts, n, range->last[d], high);
        }
        cuts[n] = high;
        t->classes[at] = n;
        t->strides[at] = stride;
        stride *= n;
    }
    for (int cell = 0; cell < stride; cell++) {
        for (int d = 0; d < t->ndim; d++) {
            t->coordinates[cell][d] = (unsigned char)(cell / t->strides[d] % t->classes[d]);
        }
    }
}

/* The class of a coordinate. */
static int
class_of(const tiling *t, size_t d, int64_t x)
{
    int c = 0;
    while (t->cuts[d][c + 1] <= x) {
        c++;
    }
    return c;
}

/* Add the heads (direction 1), level by level, where there is an element after the first that leaves it at that level; or the
 * tails (-1), the same from the last element. end: that element in the dimensions searched. Returns its cell. */
static int
make_ends(tiling *t, const int64_t *end, size_t level, int direction)
{
    int prefix = 0; /* the cell of (end[0..d), 0, ...) */
    for (size_t d = 0; d <= level; d++) {
        /* Below the level of a tail every coordinate is in its last class: the stride less one cell. */
        const int64_t x = end[d] + (d == level ? 0 : direction);
        const int rest = direction > 0 ? 0 : t->strides[d] - 1;
        if (x >= t->cuts[d][0] && x < t->cuts[d][t->classes[d]]) {
            const int cell = prefix + class_of(t, d, x) * t->strides[d] + rest;
            t->ends[t->num_ends].cell = cell;
            t->ends[t->num_ends++].direction = direction;
            t->marks[cell] |= direction > 0 ? IS_HEAD : IS_TAIL;
        }
        prefix += class_of(t, d, end[d]) * t->strides[d] + (d == level ? rest : 0);
    }
    return prefix;
}

/* 1 if corner a is below or at corner b in every dimension. */
static int
is_below(const tiling *t, int a, int b)
{
    for (int d = 0; d < t->ndim; d++) {
        if (coordinate(t, a, d) > coordinate(t, b, d)) {
            return 0;
        }
    }
    return 1;
}

/* 1 if the boxes [a, b] and [c, d] of corner cells share a cell. */
static int
share_cell(const tiling *t, int a, int b, int c, int d)
{
    for (int k = 0; k < t->ndim; k++) {
        if (coordinate(t, b, k) < coordinate(t, c, k) || coordinate(t, d, k) < coordinate(t, a, k)) {
            return 0;
        }
    }
    return 1;
}

static void
make_spans(tiling *t)
{
    for (int i = 0; i < t->num_ends; i++) {
        for (int j = 0; j < t->num_ends; j++) {
            if (t->ends[i].direction > 0 && t->ends[j].direction < 0 && is_below(t, t->ends[i].cell, t->ends[j].cell)) {
                t->span_head[t->num_spans] = t->ends[i].cell;
                t->span_tail[t->num_spans++] = t->ends[j].cell;
            }
        }
    }
    for (int s = 0; s < t->num_spans; s++) {
        for (int other = 0; other < t->num_spans; other++) {
            if (share_cell(t, t->span_head[s], t->span_tail[s], t->span_head[other], t->span_tail[other])) {
                t->span_clash[s] |= (uint32_t)1 << other;
            }
        }
    }
}

/* The next cell after `cell` of the box [lower, upper]; -1 after the last one. Start with lower. */
static int
next_in_box(const tiling *t, int lower, int upper, int cell)
{
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (coordinate(t, cell, d) < coordinate(t, upper, d)) {
            return cell + t->strides[d];
        }
        cell -= (coordinate(t, cell, d) - coordinate(t, lower, d)) * t->strides[d];
    }
    return -1;
}

static void
mark_box(tiling *t, int lower, int upper, unsigned char value)
{
    for (int cell = lower; cell >= 0; cell = next_in_box(t, lower, upper, cell)) {
        t->used[cell] = value;
    }
}

static int
is_free(tiling *t, int lower, int upper)
{
    for (int cell = lower; cell >= 0; cell = next_in_box(t, lower, upper, cell)) {
        t->work--;
        if (t->used[cell] != FREE) {
            return 0;
        }
    }
    return 1;
}

/* The most disjoint spans among those of the set. */
static int
most_disjoint(tiling *t, uint32_t set)
{
    int best = 0;
    t->work--;
    for (int s = 0; set != 0; s++) {
        const uint32_t bit = (uint32_t)1 << s;
        if (set & bit) {
            const int with = 1 + most_disjoint(t, set & ~t->span_clash[s]); /* a span clashes with itself */
            best = with > best ? with : best;
            set &= ~bit; /* from here on without this one */
        }
    }
    return best;
}

/* How many more boxes there must be at least. */
static int
lower_bound(tiling *t)
{
    int corners = 0;
    uint32_t free_spans = 0;
    for (int i = 0; i < t->num_ends; i++) {
        corners += t->used[t->ends[i].cell] == FREE;
    }
    for (int s = 0; s < t->num_spans; s++) {
        if (is_free(t, t->span_head[s], t->span_tail[s])) {
            free_spans |= (uint32_t)1 << s;
        }
    }
    return corners - most_disjoint(t, free_spans);
}

static int
corner_of(uint32_t choice)
{
    return (int)(choice & 0xFFFFu);
}

/* List the free boxes with one corner at cell whose other corner lies above it in every dimension (direction 1), or below
 * (-1), and bears the mark unless mark is 0: volume << 16 | that corner. A box is free if its far corner is, and the boxes
 * one step shorter in each dimension are: t->fits keeps that. Returns how many. */
static int
list_free_boxes(tiling *t, int cell, int direction, unsigned char mark, uint32_t *choices)
{
    int steps[DIMS] = {0}, room[DIMS];
    int corner = cell, n = 0;
    for (int d = 0; d < t->ndim; d++) {
        room[d] = direction > 0 ? t->classes[d] - 1 - coordinate(t, cell, d) : coordinate(t, cell, d);
    }
    for (;; t->work--) {
        uint32_t volume = 1;
        unsigned char fits = t->used[corner] == FREE;
        for (int d = 0; d < t->ndim; d++) {
            volume *= (uint32_t)(steps[d] + 1);
            if (steps[d] > 0) {
                fits = fits && t->fits[corner - direction * t->strides[d]];
            }
        }
        t->fits[corner] = fits;
        if (fits && (mark == 0 || (t->marks[corner] & mark))) {
            choices[n++] = volume << 16 | (uint32_t)corner;
        }
        int d = t->ndim - 1;
        while (d >= 0 && steps[d] == room[d]) {
            corner -= direction * steps[d] * t->strides[d];
            steps[d--] = 0;
        }
        if (d < 0) {
            return n;
        }
        steps[d]++;
        corner += direction * t->strides[d];
    }
}

static int
by_volume_descending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

/* Tile what is free with at most `left` more boxes, numbered from depth on; each time the biggest box first. Returns the
 * number of boxes in all, or 0. */
static int
place(tiling *t, int depth, int left)
{
    int low = t->first, high = t->last;
    while (low <= high && t->used[low] != FREE) {
        low++;
    }
    if (low > high) {
        return depth;
    }
    while (t->used[high] != FREE) {
        high--;
    }
    const int bound = left > 0 ? lower_bound(t) : 1;
    if (bound > left || t->work <= 0) {
        return 0;
    }
    const int any = left > bound; /* a box may hold neither a head nor a tail */
    const unsigned char up_mark = any || (t->marks[low] & IS_HEAD) ? 0 : IS_TAIL;
    const unsigned char down_mark = any || (t->marks[high] & IS_TAIL) ? 0 : IS_HEAD;
    uint32_t *up = t->choices[depth][0], *down = t->choices[depth][1];
    const int num_up = list_free_boxes(t, low, 1, up_mark, up);
    const int num_down = list_free_boxes(t, high, -1, down_mark, down);
    const int upwards = num_up <= num_down, n = upwards ? num_up : num_down;
    uint32_t *choices = upwards ? up : down;
    qsort(choices, (size_t)n, sizeof *choices, by_volume_descending);
    for (int i = 0; i < n; i++) {
        const int corner = corner_of(choices[i]);
        t->lower[depth] = upwards ? low : corner;
        t->upper[depth] = upwards ? corner : high;
        mark_box(t, t->lower[depth], t->upper[depth], USED);
        const int found = place(t, depth + 1, left - 1);
        if (found > 0) {
            return found;
        }
        mark_box(t, t->lower[depth], t->upper[depth], FREE);
    }
    return 0;
}

/* Let the boxes that were placed take the place of those in the list, in order of their first element. */
static void
replace_boxes(box_list *list, const grid_range *range, const tiling *t, int found)
{
    list->count = 0;
    for (int before = -1; list->count < (size_t)found;) {
        int next = 0;
        for (int b = 0; b < found; b++) {
            if (t->lower[b] > before && (t->lower[next] <= before || t->lower[b] < t->lower[next])) {
                next = b;
            }
        }
        before = t->lower[next];
        const size_t at = list->count * list->ndim + range->from;
        add_box(list, range, range->first, range->from, 0, 1); /* the dimensions above and below those searched */
        for (int d = 0; d < t->ndim; d++) {
            const int64_t low = t->cuts[d][coordinate(t, before, d)];
            list->offsets[at + (size_t)d] = low;
            list->sizes[at + (size_t)d] = t->cuts[d][coordinate(t, t->upper[next], d) + 1] - low;
        }
    }
}

/* Replace the staircase by the smallest tiling, unless that has as many boxes or the search gives up. */
static fp_status
shrink(box_list *list, const grid_range *range)
{
    if (list->count <= 2 || range->to - range->from > DIMS) { /* a range that is no box needs two */
        return FP_OK;
    }
    tiling *t = fp_calloc(1, sizeof *t);
    if (t == NULL) {
        return FP_ENOMEM;
    }
    t->work = MOST_WORK;
    make_classes(t, range);
    t->first = make_ends(t, range->first + range->from, range->first_level - range->from, 1);
    t->last = make_ends(t, range->last + range->from, range->last_level - range->from, -1);
    make_spans(t);
    for (int cell = 0; cell < MOST_CELLS; cell++) {
        t->used[cell] = cell < t->first || cell > t->last ? USED : FREE;
    }
    int found = 0;
    for (int most = lower_bound(t); most < (int)list->count && found == 0 && t->work > 0; most++) {
        found = place(t, 0, most);
    }
    if (found > 0) {
        replace_boxes(list, range, t, found);
    }
    fp_free(t);
    return FP_OK;
}

/* The product of the sizes. */
static fp_status
product(const int64_t *shape, size_t ndim, int64_t *out)
{
    int64_t numel = 1;
    int is_empty = 0;
    for (size_t d = 0; d < ndim; d++) {
        if (shape[d] < 0) {
            return FP_EINVAL;
        }
        is_empty |= shape[d] == 0;
    }
    for (size_t d = 0; d < ndim && !is_empty; d++) {
        if (numel > INT64_MAX / shape[d]) {
            return FP_EOVERFLOW;
        }
        numel *= shape[d];
    }
    *out = is_empty ? 0 : numel;
    return FP_OK;
}

fp_status
fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets, int64_t *sizes,
                  size_t *count)
{
    grid_range range;
    box_list list = {.ndim = ndim, .offsets = offsets, .sizes = sizes};
    int64_t numel;
    if (ndim > FP_MAX_DIMS || (shape == NULL && ndim > 0)) {
        return FP_EINVAL;
    }
    fp_status status = product(shape, ndim, &numel);
    if (status != FP_OK) {
        return status;
    }
    if (begin < 0 || begin > end || end > numel) {
        return FP_EINVAL;
    }
    if (begin < end && ndim == 0) {
        list.count = 1;
    }
    else if (begin < end) {
        describe(&range, shape, ndim, begin, end);
        if (range.from == ndim) { /* one element */
            add_box(&list, &range, range.first, ndim - 1, range.first[ndim - 1], range.first[ndim - 1] + 1);
        }
        else {
            add_staircase(&list, &range);
            status = shrink(&list, &range);
        }
    }
    if (status == FP_OK) {
        *count = list.count;
    }
    return status;
}
