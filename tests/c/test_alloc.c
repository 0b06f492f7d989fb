/* test_alloc.c -- blocks are zero and counted; the chosen allocation fails, once. */
#include "core/fp_alloc.h"

#include "check.h"

static void
test_blocks(void)
{
    unsigned char *block = fp_calloc(10, 10);
    int any = 0;
    CHECK(block != NULL);
    for (int i = 0; block != NULL && i < 100; i++) {
        any |= block[i];
    }
    CHECK_EQ(any, 0);
    CHECK_EQ(fp_alloc_live(), 1);
    fp_free(block);
    CHECK_EQ(fp_alloc_live(), 0);
    fp_free(NULL);
    CHECK_EQ(fp_alloc_live(), 0);
    void *empty = fp_calloc(0, 8);
    CHECK(empty != NULL);
    fp_free(empty);
    CHECK(fp_calloc(SIZE_MAX / 2, 4) == NULL);
}

static void
test_failures(void)
{
    for (int64_t k = 1; k <= 4; k++) {
        fp_alloc_fail_at(k);
        for (int64_t i = 1; i <= 5; i++) {
            void *block = fp_calloc(1, 1);
            CHECK_EQ(block == NULL, i == k);
            fp_free(block);
        }
    }
    fp_alloc_fail_at(1);
    fp_alloc_fail_at(0);
    void *block = fp_calloc(1, 1);
    CHECK(block != NULL);
    fp_free(block);
}

int
main(void)
{
    test_blocks();
    test_failures();
    return check_result();
}
