/* device_waits.h: waits for the work of devices, at the borders of recordings. */
#ifndef MM_DEVICE_WAITS_H
#define MM_DEVICE_WAITS_H

#include "../driver/driver.h"

/* Both wait for the current context, and for every device that this library has worked on, unless
 * a stream captures a graph: the wait would destroy the capture. Then the first one sets *waited
 * to false, and the second one fails with MM_REFUSED. */
MM_NODISCARD int mm_await_devices_unless_capturing(mm_driver *cu, bool *waited, mm_status *st);
MM_NODISCARD int mm_await_devices_without_captures(mm_driver *cu, mm_status *st);

#endif
