/* module_functions.h: the module's free functions. */
#ifndef MM_MODULE_FUNCTIONS_H
#define MM_MODULE_FUNCTIONS_H

#include "compat.h"

extern PyMethodDef mm_functions[];

/* The function _synchronize, in buffer_arrays.c. */
mm_positional_method mm_synchronize;
extern const char mm_synchronize_doc[];

/* The functions _results_usage, _results_limit and _results_trim, in result_object.c. */
mm_plain_method mm_results_usage, mm_results_limit, mm_results_trim;
extern const char mm_results_usage_doc[], mm_results_limit_doc[], mm_results_trim_doc[];

/* The functions _memory_counts, _memory_kept and _memory_living, in memory_statistics.c. */
mm_plain_method mm_memory_counts_read, mm_memory_kept, mm_memory_living;
extern const char mm_memory_counts_doc[], mm_memory_kept_doc[], mm_memory_living_doc[];

/* The function _device_memory, in oversubscription.c. */
mm_plain_method mm_device_memory_totals;
extern const char mm_device_memory_totals_doc[];

/* The functions _numpy_handler and _set_numpy_handler, in numpy_allocator.c. */
mm_keyword_method mm_numpy_handler;
mm_plain_method mm_set_numpy_handler;
extern const char mm_numpy_handler_doc[], mm_set_numpy_handler_doc[];

/* residency(), in buffer_residency.c. */
mm_keyword_method mm_residency;
extern const char mm_residency_doc[];

#endif
