/* advice.h: one advice on one range: giving it, seeing to it that the driver records it, and putting
 * back what was there when the driver fails. */
#ifndef MM_ADVICE_H
#define MM_ADVICE_H

#include "range.h"

/* Advises a range, and sees to it that what is set also reads back from the range. When the driver
 * fails, also after it acted, what all pages had is there again; pages that differed keep what they
 * have, or if the driver acted, have none of it. */
MM_NODISCARD int mm_range_advise(mm_driver *cu, mm_range range, CUmem_advise advice,
                                 CUmemLocation where, mm_status *st);

/* The same, but a failure leaves what it leaves. */
MM_NODISCARD int mm_range_advise_settled(mm_driver *cu, mm_range range, CUmem_advise advice,
                                         CUmemLocation where, mm_status *st);

/* Just the driver's call, for those who read afterwards what it recorded, and for ranges whose pages
 * are alike: where they are not, the records of some may stay as they were. */
MM_NODISCARD int mm_range_advise_once(mm_driver *cu, mm_range range, CUmem_advise advice,
                                      CUmemLocation where, mm_status *st);

/* What a range had, in the respect that an advice is about. */
typedef struct {
    bool whole; /* all pages had the same; else none had any, or they differed, or nobody tells */
    CUmemLocation where; /* then where they were preferred, or who accesses them */
} mm_advice_before;

/* Reads it with one query; -1 where the driver does not tell. System memory, of which it never tells,
 * is none of these failures. */
MM_NODISCARD int mm_advice_remember(mm_driver *cu, mm_range range, CUmem_advise advice,
                                    CUmemLocation where, mm_advice_before *before, mm_status *st);

/* How far an advice got before a failure: not to this range; to this range, where it failed; beyond. */
typedef enum { MM_NOT_TRIED, MM_FAILED, MM_GIVEN } mm_advice_fate;

/* Puts back what a range had, or takes the advice from all of its pages where it was given and they
 * did not have the same. A failure is dropped, because an earlier one is being reported. */
void mm_advice_put_back(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                        const mm_advice_before *before, mm_advice_fate fate);

/* One such call for each of the members: on or off. What was done before a failure stays. */
MM_NODISCARD int mm_range_switch_accessed_by(mm_driver *cu, mm_range range,
                                             mm_location_set members, bool on, mm_status *st);

/* Goes from one accessed-by set, which all pages have, to another with one advice for each member
 * that differs, and one query where members were added, so that they read back. When the driver
 * fails in the middle, takes back what was done; then pages that had some of the added members have
 * none of those. */
MM_NODISCARD int mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                                             mm_location_set to, mm_status *st);

#endif
