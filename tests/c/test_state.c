/* test_state.c -- values that are no state or event; a message that does not fit. The moves: tests/core/test_core_state.py.
 * */
#include "core/fp_state.h"

#include <string.h>

#include "check.h"

int
main(void)
{
    fp_unit_state next = FP_STATE_FORWARD;
    char text[FP_STATE_MESSAGE_BYTES], small[10];
    int longest = 0;
    CHECK_EQ(fp_state_next((fp_unit_state)FP_STATE_COUNT, FP_EVENT_RESET, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next((fp_unit_state)-1, FP_EVENT_RESET, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next(FP_STATE_IDLE, (fp_unit_event)FP_EVENT_COUNT, &next), FP_EINVAL);
    CHECK_EQ(fp_state_next(FP_STATE_IDLE, FP_EVENT_END_SUMMON, &next), FP_ESTATE);
    CHECK_EQ(next, FP_STATE_FORWARD);
    CHECK(fp_state_name((fp_unit_state)FP_STATE_COUNT) == NULL);
    CHECK(fp_event_name((fp_unit_event)-1) == NULL);
    for (int state = 0; state < FP_STATE_COUNT; state++) {
        for (int event = 0; event < FP_EVENT_COUNT; event++) {
            fp_state_message((fp_unit_state)state, (fp_unit_event)event, text, sizeof text);
            longest = (int)strlen(text) > longest ? (int)strlen(text) : longest;
            CHECK(strstr(text, fp_state_name((fp_unit_state)state)) != NULL);
            fp_state_message((fp_unit_state)state, (fp_unit_event)event, small, sizeof small);
            CHECK_EQ(strlen(small), sizeof small - 1);
        }
    }
    CHECK(longest < FP_STATE_MESSAGE_BYTES - 1);
    for (int status = FP_OK; status <= FP_ESTATE + 1; status++) {
        CHECK(fp_status_message((fp_status)status) != NULL);
    }
    return check_result();
}
