/* core/fp_boxes.c -- a range as few boxes: it is cut up, each part in the way that takes the fewest.
 *
 * What a part of the grid, itself a box, has of the range is one box if all of it is in the range, and none if none is.
 * Any other part is cut in two, or round a corner: into three parts that each go all the way along one of three
 * dimensions, and the two corners that these leave. Elements [1, 7) of (2, 2, 2) are such a corner, of three boxes.
 *
 * Only the order of a coordinate to those of the range's ends matters, so all cuts are next to these. There are few parts
 * then, and how many boxes each takes is kept.
 *
 * The last dimensions may count as one, whose coordinates are elements in row-major order. Where a part has an interval of
 * them, that is a range of its own, in fewer dimensions. As many are taken together as gives the fewest boxes. */
#include "core/fp_boxes.h"

#include <limits.h>
#include <string.h>

#include "core/fp_alloc.h"

/* A grid has up to DIMS dimensions. In each there are 4 cuts beside its ends; in the first one 2, as the range lies between
 * its ends. */
enum { DIMS = 5, CUTS = 6, PAIRS = CUTS * (CUTS - 1) / 2, FIRST_PAIRS = 4 * 3 / 2 };

typedef struct {
    size_t ndim;
    const int64_t *shape;
    int64_t rows[FP_MAX_DIMS]; /* elements of what one coordinate of each dimension has */
    /* The box that is being made: where its dimensions so far begin, and their sizes. */
    int64_t at[FP_MAX_DIMS], size[FP_MAX_DIMS];
    int64_t *offsets, *sizes; /* the caller's, in order of the first element */
    size_t count;
    unsigned char *room; /* for what grids keep */
} tiling;

/* Dimensions [dim, dim + ndim - 1), and all further ones as the last dimension of the grid. */
typedef struct {
    size_t dim, ndim;
    int64_t first[DIMS], last[DIMS]; /* of the range */
    int64_t cuts[DIMS][CUTS];
    size_t num_cuts[DIMS];
    size_t pairs[DIMS];              /* of cuts */
    unsigned char *known;            /* of each part: how many boxes it takes, and 1 */
    unsigned char tails[CUTS][CUTS]; /* the same of the intervals of the last dimension */
} grid;

/* What is between two cuts, [low, high), in each dimension. */
typedef struct {
    unsigned char low[DIMS], high[DIMS];
} part;

/* The parts of the best way to cut one up that was found so far. */
typedef struct {
    part parts[5];
    size_t n;
    int boxes;
} cutting;

static int tile_part(tiling *t, grid *g, part p, int places);
static int tile_range(tiling *t, size_t dim, int64_t begin, int64_t end, int places);

/* The order of two elements, by their coordinates: less than, equal to or greater than 0. */
static int
compare(const int64_t *a, const int64_t *b, size_t ndim)
{
    size_t d = 0;
    while (d + 1 < ndim && a[d] == b[d]) {
        d++;
    }
    return (a[d] > b[d]) - (a[d] < b[d]);
}

static void
place_box(tiling *t)
{
    const size_t ndim = t->ndim, bytes = ndim * sizeof(int64_t);
    size_t b = t->count++;
    for (; b > 0 && compare(t->offsets + (b - 1) * ndim, t->at, ndim) > 0; b--) {
        memcpy(t->offsets + b * ndim, t->offsets + (b - 1) * ndim, bytes);
        memcpy(t->sizes + b * ndim, t->sizes + (b - 1) * ndim, bytes);
    }
    memcpy(t->offsets + b * ndim, t->at, bytes);
    memcpy(t->sizes + b * ndim, t->size, bytes);
}

static part
below(part p, size_t d, int cut)
{
    p.high[d] = (unsigned char)cut;
    return p;
}

static part
above(part p, size_t d, int cut)
{
    p.low[d] = (unsigned char)cut;
    return p;
}

static void
try_cutting(tiling *t, grid *g, const part *parts, size_t n, cutting *best)
{
    int boxes = 0;
    for (size_t i = 0; i < n && boxes < best->boxes; i++) {
        boxes += tile_part(t, g, parts[i], 0);
    }
    if (boxes < best->boxes) {
        memcpy(best->parts, parts, n * sizeof *parts);
        best->n = n;
        best->boxes = boxes;
    }
}

/* Try all corners in dimensions a, b, c: a part goes along c where a is low and b is high, and so on in a circle. */
static void
try_corners(tiling *t, grid *g, part p, size_t a, size_t b, size_t c, cutting *best)
{
    for (int i = p.low[a] + 1; i < p.high[a]; i++) {
        for (int j = p.low[b] + 1; j < p.high[b]; j++) {
            const part along_c = above(below(p, a, i), b, j);
            const int boxes = tile_part(t, g, along_c, 0);
            for (int k = p.low[c] + 1; k < p.high[c] && boxes > 0 && boxes + 2 < best->boxes; k++) {
                const part parts[5] = {
                    along_c,
                    above(below(p, b, j), c, k),
                    above(below(p, c, k), a, i),
                    below(below(below(p, a, i), b, j), c, k),
                    above(above(above(p, a, i), b, j), c, k),
                };
                try_cutting(t, g, parts, 5, best);
            }
        }
    }
}

/* Of a part that has something of the range at all of its sides, but not only that. */
static cutting
best_cutting(tiling *t, grid *g, part p)
{
    cutting best;
    best.boxes = INT_MAX;
    for (size_t d = 0; d < g->ndim; d++) {
        for (int cut = p.low[d] + 1; cut < p.high[d] && best.boxes > 2; cut++) {
            const part halves[2] = {below(p, d, cut), above(p, d, cut)};
            if (tile_part(t, g, halves[0], 0) + 1 < best.boxes) { /* the other one takes some too */
                try_cutting(t, g, halves, 2, &best);
            }
        }
    }
    for (size_t a = 0; a < g->ndim; a++) {
        for (size_t b = a + 1; b < g->ndim; b++) {
            for (size_t c = b + 1; c < g->ndim && best.boxes > 3; c++) {
                try_corners(t, g, p, a, b, c, &best);
                try_corners(t, g, p, a, c, b, &best);
            }
        }
    }
    return best;
}

/* A part that is in the range: how many boxes it takes, one for each of its interval in the last dimension. */
static int
tile_inside(tiling *t, grid *g, part p, int places)
{
    const size_t tail = g->ndim - 1;
    unsigned char *known = &g->tails[p.low[tail]][p.high[tail]];
    if (*known == 0 || places) {
        for (size_t d = 0; d < tail; d++) {
            t->at[g->dim + d] = g->cuts[d][p.low[d]];
            t->size[g->dim + d] = g->cuts[d][p.high[d]] - g->cuts[d][p.low[d]];
        }
        *known = (unsigned char)tile_range(t, g->dim + tail, g->cuts[tail][p.low[tail]], g->cuts[tail][p.high[tail]],
                                           places);
    }
    return *known;
}

/* Leave out of a part, with these corners, what has nothing of the range at its sides; whether there is any. */
static int
leave_out(const grid *g, part *p, int64_t *lower, int64_t *upper)
{
    const part whole = *p;
    for (size_t d = 0; d < g->ndim; d++) {
        const int64_t low = lower[d], high = upper[d];
        int side = p->low[d];
        do {
            upper[d] = g->cuts[d][++side] - 1;
        } while (compare(upper, g->first, g->ndim) < 0);
        p->low[d] = (unsigned char)(side - 1);
        upper[d] = high;
        side = p->high[d];
        do {
            lower[d] = g->cuts[d][--side];
        } while (compare(lower, g->last, g->ndim) > 0);
        p->high[d] = (unsigned char)(side + 1);
        lower[d] = low;
    }
    return memcmp(&whole, p, sizeof whole) != 0;
}

/* How many boxes a part takes; places: they are placed. */
static int
tile_part(tiling *t, grid *g, part p, int places)
{
    int64_t lower[DIMS] = {0}, upper[DIMS] = {0}; /* gcc at -O3 takes a range without dimensions for possible */
    size_t index = 0;
    for (size_t d = 0; d < g->ndim; d++) {
        index = index * g->pairs[d] + (size_t)(p.high[d] * (p.high[d] - 1) / 2 + p.low[d]);
    }
    unsigned char *known = &g->known[index];
    if (*known != 0 && !places) {
        return *known - 1;
    }
    for (size_t d = 0; d < g->ndim; d++) {
        lower[d] = g->cuts[d][p.low[d]];
        upper[d] = g->cuts[d][p.high[d]] - 1;
    }
    const size_t ndim = g->ndim;
    int boxes = 0;
    if (compare(lower, g->first, ndim) >= 0 && compare(upper, g->last, ndim) <= 0) {
        boxes = tile_inside(t, g, p, places);
    }
    else if (compare(upper, g->first, ndim) >= 0 && compare(lower, g->last, ndim) <= 0) {
        if (leave_out(g, &p, lower, upper)) {
            boxes = tile_part(t, g, p, places);
        }
        else {
            const cutting best = best_cutting(t, g, p);
            for (size_t i = 0; places && i < best.n; i++) {
                tile_part(t, g, best.parts[i], 1);
            }
            boxes = best.boxes;
        }
    }
    *known = (unsigned char)(boxes + 1);
    return boxes;
}

/* Add a cut between the ends, in ascending order, once. */
static void
add_cut(grid *g, size_t d, int64_t cut)
{
    int64_t *cuts = g->cuts[d];
    const size_t n = g->num_cuts[d];
    size_t at = n;
    while (at > 0 && cuts[at - 1] >= cut) {
        at--;
    }
    if (at > 0 && at < n && cuts[at] != cut) {
        memmove(cuts + at + 1, cuts + at, (n - at) * sizeof *cuts);
        cuts[at] = cut;
        g->num_cuts[d]++;
    }
}

/* How many boxes elements [begin, end) of dimensions [dim, ...) take, where those from dim + split on count as one. Rows of
 * dimension level are complete. */
static int
tile_grid(tiling *t, size_t dim, size_t split, size_t level, int64_t begin, int64_t end, int places)
{
    grid g = {.dim = dim, .ndim = split + 1, .known = t->room};
    part whole = {0};
    size_t parts = 1;
    for (size_t d = 0; d <= split; d++) {
        const int64_t row = d < split ? t->rows[dim + d] : 1;
        const int64_t size = d < split ? t->shape[dim + d] : t->rows[dim + split - 1];
        g.first[d] = begin / row % size;
        g.last[d] = (end - 1) / row % size;
        g.cuts[d][0] = d == 0 ? g.first[d] : 0;
        g.cuts[d][1] = d == 0 ? g.last[d] + 1 : size;
        g.num_cuts[d] = 2;
        add_cut(&g, d, g.first[d]);
        add_cut(&g, d, g.first[d] + (begin % row != 0));
        add_cut(&g, d, g.last[d] + (end % row == 0));
        add_cut(&g, d, g.last[d] + 1);
        if (d == split && dim + split < level) { /* what begins or ends a range there may go with other parts */
            add_cut(&g, d, g.first[d] + t->rows[level]);
            add_cut(&g, d, g.last[d] + 1 - t->rows[level]);
        }
        whole.high[d] = (unsigned char)(g.num_cuts[d] - 1);
        g.pairs[d] = g.num_cuts[d] * (g.num_cuts[d] - 1) / 2;
        parts *= g.pairs[d];
    }
    memset(g.known, 0, parts);
    t->room += parts;
    const int boxes = tile_part(t, &g, whole, places);
    t->room -= parts;
    return boxes;
}

/* How many boxes elements [begin, end) of dimensions [dim, ...) take; places: they are placed, at the coordinates that
 * t->at and t->size have for the dimensions before. */
static int
tile_range(tiling *t, size_t dim, int64_t begin, int64_t end, int places)
{
    const int64_t *rows = t->rows;
    if (begin >= end) {
        return 0;
    }
    for (; dim < t->ndim && begin / rows[dim] == (end - 1) / rows[dim]; dim++) {
        t->at[dim] = begin / rows[dim];
        t->size[dim] = 1;
        begin %= rows[dim];
        end = (end - 1) % rows[dim] + 1;
    }
    size_t level = dim; /* below it all rows are complete */
    while (level < t->ndim && (begin % rows[level] != 0 || end % rows[level] != 0)) {
        level++;
    }
    if (level == dim) {
        for (size_t d = dim; d < t->ndim; d++) {
            t->at[d] = d == dim ? begin / rows[d] : 0;
            t->size[d] = d == dim ? (end - begin) / rows[d] : t->shape[d];
        }
        if (places) {
            place_box(t);
        }
        return 1;
    }
    if (level - dim >= DIMS) {
        const int64_t row = rows[dim], low = (begin / row + (begin % row != 0)) * row, high = end / row * row;
        return tile_range(t, dim, begin, low, places) + tile_range(t, dim, low, high, places) +
               tile_range(t, dim, high, end, places);
    }
    const size_t most = level - dim;
    size_t best = most;
    int fewest = INT_MAX;
    for (size_t split = most; split >= 2 || split == most; split--) {
        const int boxes = tile_grid(t, dim, split, level, begin, end, 0);
        if (boxes < fewest) {
            fewest = boxes;
            best = split;
        }
    }
    return places ? tile_grid(t, dim, best, level, begin, end, 1) : fewest;
}

/* Fill t->rows; *numel becomes the product of the sizes. */
static fp_status
count_rows(tiling *t, int64_t *numel)
{
    int is_empty = 0, overflows = 0;
    *numel = 1;
    for (size_t d = t->ndim; d-- > 0;) {
        if (t->shape[d] < 0) {
            return FP_EINVAL;
        }
        t->rows[d] = *numel;
        is_empty |= t->shape[d] == 0;
        overflows |= __builtin_mul_overflow(*numel, t->shape[d] == 0 ? 1 : t->shape[d], numel);
    }
    *numel = is_empty ? 0 : *numel;
    return overflows && !is_empty ? FP_EOVERFLOW : FP_OK;
}

fp_status
fp_boxes_of_range(const int64_t *shape, size_t ndim, int64_t begin, int64_t end, int64_t *offsets, int64_t *sizes,
                  size_t *count)
{
    tiling t = {.ndim = ndim, .shape = shape, .offsets = offsets, .sizes = sizes};
    int64_t numel;
    if (ndim > FP_MAX_DIMS || (shape == NULL && ndim > 0)) {
        return FP_EINVAL;
    }
    const fp_status status = count_rows(&t, &numel);
    if (status != FP_OK) {
        return status;
    }
    if (begin < 0 || begin > end || end > numel) {
        return FP_EINVAL;
    }
    size_t room = FIRST_PAIRS;
    for (size_t d = 1; d < ndim && d < DIMS; d++) {
        room *= PAIRS;
    }
    unsigned char *const kept = t.room = fp_calloc(room, 1);
    if (kept == NULL) {
        return FP_ENOMEM;
    }
    tile_range(&t, 0, begin, end, 1);
    fp_free(kept);
    *count = t.count;
    return FP_OK;
}
