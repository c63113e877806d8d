/* Makes allocations fail, for tests/support/allocations.py: the extension's (its entries of malloc,
 * calloc, realloc and free are replaced) and those of CPython (hooks around its allocators). Counts the
 * blocks that live. Loaded into a running Python; knows nothing of Python's headers. */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <unwind.h>

#define EXPORT __attribute__((visibility("default")))

enum { DOMAINS = 3 };

/* One countdown for each kind of allocation: 1 fails the next one, 0 none. */
typedef struct {
    long countdown;
    bool fired;
    atomic_long live;
} allocations;

static allocations of_extension, of_python;
static pthread_t armed_thread;
static bool armed;

/* Defects of the extension that a sweep must find. */
static bool keeps_blocks, does_not_check;

typedef struct {
    uintptr_t start, end;
} code;

static code watched, evaluator;

static bool
is_in(code c, const void *address)
{
    return (uintptr_t)address >= c.start && (uintptr_t)address < c.end;
}

static _Unwind_Reason_Code
look_at_frame(struct _Unwind_Context *frame, void *given)
{
    const void *address = (const void *)_Unwind_GetIP(frame);
    bool *found = given;

    *found = is_in(watched, address);
    return *found || is_in(evaluator, address) ? _URC_END_OF_STACK : _URC_NO_REASON;
}

/* Whether the extension called for this memory, and not the evaluation of Python code: CPython crashes
 * or loses the exception where that has no memory for a frame, a generator or a traceback. */
static bool
extension_is_calling(void)
{
    bool found = false;

    armed = false; /* looking for the caller may allocate, too */
    (void)_Unwind_Backtrace(look_at_frame, &found);
    armed = true;
    return found;
}

/* Only the thread that armed it counts, so that other threads cannot shift the count. */
static bool
fails(allocations *a)
{
    if (!armed || !pthread_equal(pthread_self(), armed_thread) || a->countdown == 0
        || (a == &of_python && !extension_is_calling())) {
        return false;
    }
    if (--a->countdown == 0) {
        a->fired = true;
        return true;
    }
    return false;
}

static void *
counted(allocations *a, void *block)
{
    if (block != NULL) {
        atomic_fetch_add_explicit(&a->live, 1, memory_order_relaxed);
    }
    return block;
}

static void
uncounted(allocations *a, const void *block)
{
    if (block != NULL) {
        atomic_fetch_sub_explicit(&a->live, 1, memory_order_relaxed);
    }
}

/* --- the extension ------------------------------------------------------------------------ */

/* The address that an extension gets in place of NULL if it does not check: it cannot be accessed. */
static void *
nothing(void)
{
    return does_not_check ? (void *)(uintptr_t)16 : NULL;
}

static void *
failing_malloc(size_t size)
{
    return fails(&of_extension) ? nothing() : counted(&of_extension, malloc(size));
}

static void *
failing_calloc(size_t count, size_t size)
{
    return fails(&of_extension) ? nothing() : counted(&of_extension, calloc(count, size));
}

static void *
failing_realloc(void *block, size_t size)
{
    void *bigger;

    if (fails(&of_extension)) {
        return nothing();
    }
    bigger = realloc(block, size);
    return block == NULL ? counted(&of_extension, bigger) : bigger;
}

static void
counting_free(void *block)
{
    if (!keeps_blocks) {
        uncounted(&of_extension, block);
        free(block);
    }
}

static const struct {
    const char *name;
    uintptr_t wrapper;
} wrappers[] = {
    {"malloc", (uintptr_t)failing_malloc},
    {"calloc", (uintptr_t)failing_calloc},
    {"realloc", (uintptr_t)failing_realloc},
    {"free", (uintptr_t)counting_free},
};

/* The tables of a loaded library that name what it imports. */
typedef struct {
    ElfW(Addr) base;
    const ElfW(Sym) * symbols;
    const char *strings;
    const ElfW(Rela) * relocations[2];
    size_t count[2];
    int replaced;
} imports;

/* glibc stores addresses there, other C libraries offsets. */
static const void *
at(const imports *i, ElfW(Addr) location)
{
    return (const void *)(location < i->base ? i->base + location : location);
}

static void
read_tables(imports *i, const ElfW(Dyn) * entry)
{
    for (; entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB:
            i->symbols = at(i, entry->d_un.d_ptr);
            break;
        case DT_STRTAB:
            i->strings = at(i, entry->d_un.d_ptr);
            break;
        case DT_RELA:
            i->relocations[0] = at(i, entry->d_un.d_ptr);
            break;
        case DT_RELASZ:
            i->count[0] = entry->d_un.d_val / sizeof(ElfW(Rela));
            break;
        case DT_JMPREL:
            i->relocations[1] = at(i, entry->d_un.d_ptr);
            break;
        case DT_PLTRELSZ:
            i->count[1] = entry->d_un.d_val / sizeof(ElfW(Rela));
            break;
        default:
            break;
        }
    }
}

static void
replace(imports *i, const ElfW(Rela) * relocation)
{
    const char *name = i->strings + i->symbols[ELF64_R_SYM(relocation->r_info)].st_name;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), slot = i->base + relocation->r_offset;

    for (size_t k = 0; k < sizeof wrappers / sizeof *wrappers; k++) {
        if (strcmp(name, wrappers[k].name) == 0
            && mprotect((void *)(slot & ~(page - 1)), page, PROT_READ | PROT_WRITE) == 0) {
            *(uintptr_t *)slot = wrappers[k].wrapper;
            i->replaced++;
        }
    }
}

static int
visit(struct dl_phdr_info *info, size_t size, void *given)
{
    imports *i = given;

    (void)size;
    if (info->dlpi_addr != i->base) {
        return 0;
    }
    watched.start = watched.end = info->dlpi_addr;
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[k];
        uintptr_t end = info->dlpi_addr + part->p_vaddr + part->p_memsz;
        if (part->p_type == PT_DYNAMIC) {
            read_tables(i, (const void *)(info->dlpi_addr + part->p_vaddr));
        } else if (part->p_type == PT_LOAD && end > watched.end) {
            watched.end = end;
        }
    }
    return 1;
}

/* How many imported functions of the library with this address inside were replaced. */
EXPORT int
watch_extension(void *inside)
{
    imports i = {0};
    Dl_info found;

    if (dladdr(inside, &found) == 0) {
        return -1;
    }
    i.base = (ElfW(Addr))found.dli_fbase;
    (void)dl_iterate_phdr(visit, &i);
    for (int table = 0; i.symbols != NULL && i.strings != NULL && table < 2; table++) {
        for (size_t k = 0; k < i.count[table]; k++) {
            replace(&i, &i.relocations[table][k]);
        }
    }
    return i.replaced;
}

/* --- CPython ------------------------------------------------------------------------------ */

/* CPython's PyMemAllocatorEx. */
typedef struct {
    void *context;
    void *(*malloc)(void *context, size_t size);
    void *(*calloc)(void *context, size_t count, size_t size);
    void *(*realloc)(void *context, void *block, size_t size);
    void (*free)(void *context, void *block);
} allocator;

static allocator originals[DOMAINS];

static void *
hook_malloc(void *context, size_t size)
{
    const allocator *original = context;

    return fails(&of_python) ? NULL
                             : counted(&of_python, original->malloc(original->context, size));
}

static void *
hook_calloc(void *context, size_t count, size_t size)
{
    const allocator *original = context;

    return fails(&of_python)
               ? NULL
               : counted(&of_python, original->calloc(original->context, count, size));
}

static void *
hook_realloc(void *context, void *block, size_t size)
{
    const allocator *original = context;
    void *bigger;

    if (fails(&of_python)) {
        return NULL;
    }
    bigger = original->realloc(original->context, block, size);
    return block == NULL ? counted(&of_python, bigger) : bigger;
}

static void
hook_free(void *context, void *block)
{
    const allocator *original = context;

    uncounted(&of_python, block);
    original->free(original->context, block);
}

/* The addresses of PyMem_GetAllocator, PyMem_SetAllocator and _PyEval_EvalFrameDefault. Once a
 * process. */
EXPORT void
watch_python(void (*get)(int, allocator *), void (*set)(int, allocator *), void *evaluate)
{
    const ElfW(Sym) *symbol = NULL;
    Dl_info found;

    if (dladdr1(evaluate, &found, (void **)&symbol, RTLD_DL_SYMENT) != 0 && symbol != NULL) {
        evaluator =
            (code){(uintptr_t)found.dli_saddr, (uintptr_t)found.dli_saddr + symbol->st_size};
    }
    for (int domain = 0; domain < DOMAINS; domain++) {
        allocator hooks = {&originals[domain], hook_malloc, hook_calloc, hook_realloc, hook_free};

        get(domain, &originals[domain]);
        set(domain, &hooks);
    }
}

/* --- control ------------------------------------------------------------------------------ */

static void
start(allocations *a, long nth)
{
    a->countdown = nth;
    a->fired = false;
}

/* Lets the nth next allocation of this thread fail, of the extension or of CPython; 0 for none. */
EXPORT void
arm(long extension, long python)
{
    start(&of_extension, extension);
    start(&of_python, python);
    armed_thread = pthread_self();
    armed = true;
}

EXPORT void
disarm(void)
{
    armed = false;
}

EXPORT int
fired(void)
{
    return of_extension.fired || of_python.fired;
}

EXPORT void
keep_blocks(void)
{
    keeps_blocks = true;
}

EXPORT void
do_not_check(void)
{
    does_not_check = true;
}

/* The number of live blocks, of those that were allocated since watching began. */
EXPORT long
live(int python)
{
    return atomic_load(python ? &of_python.live : &of_extension.live);
}
