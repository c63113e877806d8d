/* The topics that are not in conformance.c itself, by file. */
#ifndef MANAGEDMEM_CONFORMANCE_TOPICS_H
#define MANAGEDMEM_CONFORMANCE_TOPICS_H

#include "harness.h"

/* batches.c */
void topic_batch(struct fixture *f);
void topic_batch_hosts(struct fixture *f);
void topic_batch_checks(struct fixture *f);
void topic_discarded_bytes(struct fixture *f);
void topic_page_map(struct fixture *f);
/* streams.c */
void topic_no_context(struct fixture *f);
void topic_streams(struct fixture *f);
void topic_stream_order(struct fixture *f);
void topic_busy_streams(struct fixture *f);
void topic_copies(struct fixture *f);
void topic_attach(struct fixture *f);
void topic_attach_ranges(struct fixture *f);
void topic_capture(struct fixture *f);
void topic_capture_alone(struct fixture *f);
void topic_capture_blocking(struct fixture *f);
void topic_capture_non_blocking(struct fixture *f);
void topic_capture_legacy(struct fixture *f);
void topic_capture_mode(struct fixture *f);
/* records.c */
void topic_records(struct fixture *f);
void topic_record_queries(struct fixture *f);
void topic_freed_records(struct fixture *f);
/* pools.c */
void topic_pointers(struct fixture *f);
void topic_pointers_plural(struct fixture *f);
void topic_managed_pools(struct fixture *f);
void topic_pool_frees(struct fixture *f);
void topic_pools(struct fixture *f);
/* pinned.c */
void topic_pinned(struct fixture *f);
void topic_pinned_empty(struct fixture *f);
void topic_pinned_capture(struct fixture *f);
/* locations.c */
void topic_locations(struct fixture *f);
void topic_locations_elsewhere(struct fixture *f);
/* pair.c */
void topic_pair_accessed_by(struct fixture *f);
void topic_pair_prefetch(struct fixture *f);
void topic_pair_pools(struct fixture *f);
void topic_pair_copies(struct fixture *f);
void topic_pair_no_access(struct fixture *f);
void topic_pair_new_pools(struct fixture *f);
void topic_pair_contexts(struct fixture *f);

#endif
