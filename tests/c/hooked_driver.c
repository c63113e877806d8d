/* hooked_driver.c: a driver that calls a function of the test before each flush of event queues. It
 * passes all calls to the emulated driver, to which it is linked. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "driver/uvm_abi.h"

typedef void (*flush_hook)(void);

void hook_flushes(flush_hook hook);
int emu_uvm_ioctl(int file, unsigned long request, void *argument);

static _Atomic(flush_hook) hooked;

/* NULL ends the calls. */
__attribute__((visibility("default"))) void
hook_flushes(flush_hook hook)
{
    atomic_store(&hooked, hook);
}

__attribute__((visibility("default"))) int
emu_uvm_ioctl(int file, unsigned long request, void *argument)
{
    void *next = dlsym(RTLD_NEXT, "emu_uvm_ioctl");
    flush_hook hook = atomic_load(&hooked);
    int (*pass)(int file, unsigned long request, void *argument);

    if (request == MM_UVM_FLUSH && hook != NULL) {
        hook();
    }
    /* Object and function pointers need not be convertible in ISO C, so the bytes are copied. */
    memcpy(&pass, &next, sizeof pass);
    return pass(file, request, argument);
}
