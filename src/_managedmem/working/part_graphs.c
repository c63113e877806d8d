/* part_graphs.c: uses in streams that capture a graph: nodes that copy parts to frames, and back,
 * at each replay.
 *
 * All graphs of a set share the second half of its room, from the first capture until the last
 * graph is gone; other uses have the first half. In a graph, frames follow each other in a ring.
 * The node of a copy depends on the copy before it and on the uses of the parts that had its
 * frame. So a replay loads parts while it uses others, although each copy is captured just before
 * its use. User objects of the driver keep the memory alive that nodes use. */
#include "part_frames_state.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/growth.h"

typedef struct {
    CUgraphNode *list;
    size_t count, capacity;
} node_list;

/* A part in the ring. */
typedef struct {
    uint32_t part; /* MM_NO_PART once it was removed */
    size_t offset, bytes;
    uint32_t number; /* as in mm_part_use.frame */
    CUgraphNode copy; /* NULL for scratch */
    unsigned held;
    bool is_lost; /* a use ended after the capture, or a call failed: the frame stays taken */
    node_list ends;
} ring_frame;

struct frame_capture {
    frame_capture *next;
    atomic_uint holders; /* the set and the graph */
    atomic_bool is_gone; /* the graph */
    mm_slab *slab;
    cuuint64_t id;
    bool is_blind; /* a call failed: no more copies */
    node_list behind; /* the nodes that the next copy depends on */
    ring_frame *frames;
    size_t count, capacity;
    size_t next_offset;
};

/* A stream that captures. */
typedef struct {
    CUstream stream;
    CUcontext context;
    CUgraph graph;
    cuuint64_t id;
    const CUgraphNode *front; /* what the next node depends on; valid until the next call */
    size_t count;
} capture_view;

/* --- nodes -------------------------------------------------------------------------------- */

static int
add_nodes(node_list *nodes, const CUgraphNode *added, size_t count, mm_status *st)
{
    size_t needed = nodes->count + count;
    node_list grown = *nodes;

    grown.list = mm_grow(grown.list, &grown.capacity, needed, sizeof *grown.list, st);
    *nodes = grown;
    if (grown.list == NULL || grown.capacity < needed) { /* the first test is for the analyzer */
        return count > 0 ? -1 : 0;
    }
    for (size_t i = 0; i < count; i++) {
        grown.list[grown.count + i] = added[i];
    }
    nodes->count = needed;
    return 0;
}

/* Drivers refuse a list with one node twice. */
static size_t
sort_out_doubles(node_list *nodes)
{
    size_t kept = 0;

    for (size_t i = 0; i < nodes->count; i++) {
        size_t k = 0;
        while (k < kept && nodes->list[k] != nodes->list[i]) {
            k++;
        }
        if (k == kept) {
            nodes->list[kept++] = nodes->list[i];
        }
    }
    nodes->count = kept;
    return kept;
}

/* Adds a copy to the graph, and makes the next copy depend on it. In a scope of the stream. */
static int
add_copy(mm_frames *f, frame_capture *c, const capture_view *v, CUdeviceptr to, CUdeviceptr from,
         size_t bytes, node_list *behind, CUgraphNode *node, mm_status *st)
{
    const CUDA_MEMCPY3D params = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                                  .srcDevice = from,
                                  .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                                  .dstDevice = to,
                                  .WidthInBytes = bytes,
                                  .Height = 1,
                                  .Depth = 1};

    MM_TRY(f->cu, GraphAddMemcpyNode, st, node, v->graph, behind->list, sort_out_doubles(behind),
           &params, v->context);
    c->behind.list[0] = *node; /* which depends on all nodes that it replaces here */
    c->behind.count = 1;
    return 0;
}

static int
follow_nodes(mm_frames *f, const capture_view *v, node_list *nodes, mm_status *st)
{
    MM_TRY(f->cu, StreamUpdateCaptureDependencies, st, v->stream, nodes->list,
           sort_out_doubles(nodes), CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
    return 0;
}

static int
follow_node(mm_frames *f, const capture_view *v, CUgraphNode *node, mm_status *st)
{
    return follow_nodes(f, v, &(node_list){node, 1, 1}, st);
}

/* --- memory that a graph names --------------------------------------------------------------- */

/* Has `destroy` called for `given` once the graph is gone, or at once on failure. A failed retain
 * is repeated, because a second reference does no harm. A failed release is not: a second release
 * could drop the reference of the graph. */
static int
give_to_graph(mm_driver *cu, CUgraph graph, void *given, CUhostFn destroy, mm_status *st)
{
    CUuserObject object = NULL;
    CUresult code =
        cu->UserObjectCreate(&object, given, destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);

    if (code != CUDA_SUCCESS) {
        destroy(given);
        return mm_fail_call(st, "cuUserObjectCreate", (int)code);
    }
    code = cu->GraphRetainUserObject(graph, object, 1, 0);
    if (code != CUDA_SUCCESS) {
        code = cu->GraphRetainUserObject(graph, object, 1, 0);
    }
    MM_IGNORE(cu->UserObjectRelease(object, 1));
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuGraphRetainUserObject", (int)code);
}

/* In a thread of the driver. */
static void CUDA_CB
free_home(void *slab)
{
    mm_slab_defer_free(slab);
}

/* Keeps the slab of a home for the graph. The caller keeps a home without a slab. */
static int
keep_home(mm_frames *f, const capture_view *v, uint32_t number, mm_status *st)
{
    mm_slab *home;

    mm_frames_lock(f);
    home = mm_slab_hold(f->parts[number].home, f->places[number].bytes);
    mm_frames_unlock(f);
    return home == NULL ? 0 : give_to_graph(f->cu, v->graph, home, free_home, st);
}

static void
drop_holder(frame_capture *c)
{
    if (atomic_fetch_sub(&c->holders, 1) == 1) {
        free(c);
    }
}

/* In a thread of the driver. */
static void CUDA_CB
end_graph(void *capture)
{
    frame_capture *c = capture;

    mm_slab_defer_free(c->slab);
    atomic_store(&c->is_gone, true);
    drop_holder(c);
}

/* --- captures, under the lock ------------------------------------------------------------- */

static void
free_lists(frame_capture *c)
{
    for (size_t i = 0; i < c->count; i++) {
        free(c->frames[i].ends.list);
    }
    free(c->frames);
    free(c->behind.list);
}

static void
unlink_capture(frame_capture **link)
{
    frame_capture *gone = *link;

    *link = gone->next;
    free_lists(gone);
    drop_holder(gone);
}

void
mm_frames_free_captures(mm_frames *f)
{
    while (f->captures != NULL) {
        unlink_capture(&f->captures);
    }
}

void
mm_frames_expect_replay(mm_frames *f, uint32_t number)
{
    frame_part *part = &f->parts[number];

    if (part->is_written_by_graph && part->held > 0 && part->writers == 0) {
        part->is_stale = true;
    }
}

void
mm_frames_prune_captures(mm_frames *f)
{
    frame_capture **link = &f->captures;

    while (*link != NULL) {
        if (atomic_load(&(*link)->is_gone)) {
            unlink_capture(link);
        } else {
            link = &(*link)->next;
        }
    }
    if (f->captures == NULL && f->ring > 0) {
        f->placement.room += f->ring;
        f->ring = 0;
        for (uint32_t i = 0; i < f->count; i++) {
            mm_frames_expect_replay(f, i);
            f->missed = f->missed || f->parts[i].is_written_by_graph;
            f->parts[i].is_written_by_graph = false;
        }
    }
}

static frame_capture *
find_capture(const mm_frames *f, cuuint64_t id)
{
    frame_capture *c = f->captures;

    while (c != NULL && c->id != id) {
        c = c->next;
    }
    return c;
}

static ring_frame *
find_open(const frame_capture *c, uint32_t number)
{
    for (size_t i = 0; i < c->count; i++) {
        if (c->frames[i].part == number && c->frames[i].held > 0 && !c->frames[i].is_lost) {
            return &c->frames[i];
        }
    }
    return NULL;
}

bool
mm_frames_is_captured(const mm_frames *f, uint32_t number)
{
    const frame_capture *c = f->captures;

    while (c != NULL && (atomic_load(&c->is_gone) || find_open(c, number) == NULL)) {
        c = c->next;
    }
    return c != NULL;
}

void
mm_frames_forget_captured(mm_frames *f, uint32_t number)
{
    for (frame_capture *c = f->captures; c != NULL; c = c->next) {
        for (size_t i = 0; i < c->count; i++) {
            c->frames[i].part = c->frames[i].part == number ? MM_NO_PART : c->frames[i].part;
        }
    }
}

static bool
overlaps(const ring_frame *frame, size_t offset, size_t bytes)
{
    return frame->offset < offset + bytes && offset < frame->offset + frame->bytes;
}

/* --- the room of graphs --------------------------------------------------------------------- */

/* Takes the second half of the room for graphs, where no part may be in use. Under the lock. */
static int
reserve_ring(mm_frames *f, mm_status *st)
{
    const size_t start = f->placement.room / 2 / MM_PART_ALIGNMENT * MM_PART_ALIGNMENT;
    int rc;

    for (uint32_t i = 0; i < f->count; i++) {
        const mm_place *place = &f->places[i];
        if (place->present && place->fixed && place->offset + place->bytes > start) {
            return mm_fail(st, MM_REFUSED, "the room of graphs is in use");
        }
    }
    MM_RUN_IN(rc, mm_scope_enter_relaxed, f->device, f->cu, st,
              mm_frames_clear(f, start, f->placement.room - start, st));
    if (rc < 0) {
        mm_frames_recover(f, st);
        return -1;
    }
    f->ring = f->placement.room - start;
    f->placement.room = start;
    return 0;
}

/* No node can depend on the work of the set's streams, so the host waits for that work: for what
 * was in the room of graphs, and for copies home. In a scope; not under the lock. */
static int
open_ring(mm_frames *f, mm_status *st)
{
    int rc = 0;

    mm_frames_lock(f);
    mm_frames_prune_captures(f);
    if (f->troubles != f->waited) {
        rc = mm_fail(st, MM_REFUSED, "the device has to be waited for, after a failure");
    } else if (f->ring == 0) {
        rc = reserve_ring(f, st);
    }
    mm_frames_unlock(f);
    if (rc < 0) {
        return -1;
    }
    MM_TRY(f->cu, StreamSynchronize, st, f->inward);
    MM_TRY(f->cu, StreamSynchronize, st, f->outward);
    return 0;
}

/* Finds room behind the latest frame, or from the start on. Under the lock. */
static bool
find_ring_room(const mm_frames *f, const frame_capture *c, size_t bytes, size_t *offset)
{
    const size_t first = f->placement.room, end = first + f->ring;
    size_t start = c->next_offset < first ? first : c->next_offset;
    int laps = 0;

    while (laps < 2) {
        const ring_frame *held = NULL;
        for (size_t i = 0; i < c->count && held == NULL; i++) {
            const ring_frame *frame = &c->frames[i];
            held = frame->held > 0 && overlaps(frame, start, bytes) ? frame : NULL;
        }
        if (start > end || bytes > end - start) {
            start = first;
            laps++;
        } else if (held == NULL) {
            *offset = start;
            return true;
        } else {
            start = mm_place_end(held->offset, held->bytes);
        }
    }
    return false;
}

/* --- uses, under the lock and in a scope of the stream ------------------------------------------ */

/* Collects the nodes on which a frame in these bytes has to depend. */
static int
collect_behind(const mm_frames *f, const frame_capture *c, const capture_view *v, size_t offset,
               size_t bytes, node_list *behind, mm_status *st)
{
    int rc = add_nodes(behind, c->behind.list, c->behind.count, st);

    for (size_t i = 0; i < c->count && rc == 0; i++) {
        const ring_frame *frame = &c->frames[i];
        if (overlaps(frame, offset, bytes)) {
            rc = add_nodes(behind, frame->ends.list, frame->ends.count, st);
        }
    }
    /* Outside of rounds, the caller may have written the part at home since. */
    return rc < 0 || f->rounds > 0 ? rc : add_nodes(behind, v->front, v->count, st);
}

static void
remove_frames(frame_capture *c, size_t offset, size_t bytes)
{
    size_t kept = 0;

    for (size_t i = 0; i < c->count; i++) {
        ring_frame *frame = &c->frames[i];
        if (overlaps(frame, offset, bytes)) {
            assert(frame->held == 0);
            free(frame->ends.list);
        } else {
            c->frames[kept++] = *frame;
        }
    }
    c->count = kept;
}

/* Scratch has no copy that depends on these nodes, so the next copy must depend on them: an
 * evicted frame may have had more bytes than the new frame in its place. */
static void
keep_behind(frame_capture *c, node_list *behind)
{
    const node_list before = c->behind;

    c->behind = *behind;
    *behind = before;
}

/* Fills a frame, and lets the stream follow the copy. A failed call may have left a node that
 * writes the frame at any time, so no more copies are captured. */
static int
fill_frame(mm_frames *f, frame_capture *c, const capture_view *v, ring_frame *frame, mm_status *st)
{
    const frame_part *part = &f->parts[frame->part];
    node_list behind = {0};
    int rc = collect_behind(f, c, v, frame->offset, frame->bytes, &behind, st);

    if (rc == 0 && part->access == MM_PART_SCRATCH) {
        rc = follow_nodes(f, v, &behind, st);
    } else if (rc == 0) {
        rc = add_copy(f, c, v, f->slab->start + frame->offset, part->home, frame->bytes, &behind,
                      &frame->copy, st);
        rc = rc == 0 ? follow_node(f, v, &frame->copy, st) : rc;
    }
    if (frame->copy == NULL && rc == 0 && behind.count > 0) {
        keep_behind(c, &behind);
    }
    c->is_blind = c->is_blind || (rc < 0 && frame->copy == NULL);
    free(behind.list);
    return rc;
}

/* The address in a frame, or 0 without room; *rc: -1 after a failure. */
static CUdeviceptr
take_frame(mm_frames *f, frame_capture *c, const capture_view *v, uint32_t number, uint32_t *frame,
           int *rc, mm_status *st)
{
    ring_frame *open = find_open(c, number);
    ring_frame made = {.part = number, .bytes = f->places[number].bytes, .held = 1};

    if (open != NULL) {
        *rc = open->copy == NULL ? 0 : follow_node(f, v, &open->copy, st);
        open->held += *rc == 0;
        *frame = open->number;
        return *rc == 0 ? f->slab->start + open->offset : 0;
    }
    c->frames = mm_grow(c->frames, &c->capacity, c->count + 1, sizeof *c->frames, st);
    *rc = c->capacity > c->count ? 0 : -1;
    if (*rc < 0 || f->is_suspended || c->is_blind || made.bytes == 0
        || !find_ring_room(f, c, made.bytes, &made.offset)) {
        return 0;
    }
    *rc = fill_frame(f, c, v, &made, st);
    made.is_lost = *rc < 0;
    made.number = ++f->ring_frames != 0 ? f->ring_frames : ++f->ring_frames;
    *frame = made.number;
    remove_frames(c, made.offset, made.bytes);
    c->frames[c->count++] = made;
    c->next_offset = mm_place_end(made.offset, made.bytes);
    return *rc < 0 ? 0 : f->slab->start + made.offset;
}

/* --- calls ---------------------------------------------------------------------------------- */

/* In a scope of the stream. MM_REFUSED if it does not capture. */
static int
read_capture(mm_frames *f, CUstream stream, capture_view *v, mm_status *st)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUgraphEdgeData *edges;

    *v = (capture_view){.stream = stream};
    if (f->cu->StreamGetCaptureInfo == NULL) {
        return mm_fail(st, MM_REFUSED, "the driver shows no graph under capture");
    }
    MM_TRY(f->cu, CtxGetCurrent, st, &v->context);
    /* The call needs edge data if a kernel launches before the previous kernel ends (programmatic
     * dependent launch). An edge to a copy has none. */
    MM_TRY(f->cu, StreamGetCaptureInfo, st, stream, &status, &v->id, &v->graph, &v->front, &edges,
           &v->count);
    return status == CU_STREAM_CAPTURE_STATUS_ACTIVE
               ? 0
               : mm_fail(st, MM_REFUSED, "the stream captures no graph");
}

/* Enters a scope of the stream and reads its capture, with a second attempt. False, without a
 * scope, if it captures none. */
static bool
enter_capture(mm_frames *f, mm_device_stream stream, mm_scope *scope, capture_view *v)
{
    mm_status st = {.kind = MM_OK};

    for (int attempt = 0; attempt < 2 && st.kind != MM_REFUSED; attempt++) {
        if (mm_scope_enter_stream(scope, f->cu, stream, &st) == 0) {
            if (read_capture(f, stream.handle, v, &st) == 0) {
                return true;
            }
            mm_scope_leave(scope);
        }
    }
    return false;
}

static bool
can_copy(const mm_frames *f)
{
    const mm_driver *cu = f->cu;

    return !f->is_managed && !f->host_waits && cu->StreamGetCaptureInfo != NULL
           && cu->StreamUpdateCaptureDependencies != NULL && cu->GraphAddMemcpyNode != NULL
           && cu->UserObjectCreate != NULL && cu->UserObjectRelease != NULL
           && cu->GraphRetainUserObject != NULL;
}

/* The record of a capture that begins here. NULL on failure. */
static frame_capture *
new_capture(mm_frames *f, const capture_view *v, mm_status *st)
{
    frame_capture *c = calloc(1, sizeof *c);
    node_list behind = {0};

    /* The list has room for at least one node, the latest copy. */
    behind.list = mm_grow(NULL, &behind.capacity, v->count + 1, sizeof *behind.list, st);
    if (c == NULL || behind.list == NULL || add_nodes(&behind, v->front, v->count, st) < 0) {
        free(behind.list);
        free(c);
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for a captured graph");
        return NULL;
    }
    c->id = v->id;
    c->behind = behind;
    atomic_init(&c->holders, 2);
    c->slab = f->slab;
    mm_slab_add_holder(c->slab);
    if (give_to_graph(f->cu, v->graph, c, end_graph, st) < 0) {
        free_lists(c);
        drop_holder(c);
        return NULL;
    }
    return c;
}

/* In a scope of the stream; not under the lock. */
static int
open_capture(mm_frames *f, const capture_view *v, mm_status *st)
{
    frame_capture *made;
    bool known;

    mm_frames_lock(f);
    known = find_capture(f, v->id) != NULL;
    mm_frames_unlock(f);
    if (known) {
        return 0;
    }
    made = new_capture(f, v, st); /* before calls that end the life of the view */
    if (made == NULL) {
        return -1;
    }
    mm_frames_lock(f);
    made->next = f->captures;
    f->captures = made;
    mm_frames_unlock(f);
    if (open_ring(f, st) < 0) {
        mm_frames_lock(f);
        made->is_blind = true;
        mm_frames_unlock(f);
        return -1;
    }
    return 0;
}

/* In a scope of the stream. */
static mm_part_use
capture_entered(mm_frames *f, uint32_t number, capture_view *v, mm_status *st)
{
    mm_part_use use = {.part = number};
    frame_capture *c;
    int rc = 0;

    if (keep_home(f, v, number, st) < 0 || open_capture(f, v, st) < 0
        || read_capture(f, v->stream, v, st) < 0) {
        rc = -1;
    } else {
        mm_frames_lock(f);
        c = find_capture(f, v->id);
        if (c != NULL && f->parts[number].is_live) {
            use.address = take_frame(f, c, v, number, &use.frame, &rc, st);
        }
        mm_frames_unlock(f);
    }
    if (rc < 0 && st->kind != MM_REFUSED) {
        mm_frames_note_failure(f, st);
    }
    return use;
}

mm_part_use
mm_frames_capture(mm_frames *f, uint32_t number, mm_device_stream stream)
{
    mm_part_use use = {.part = number};
    capture_view v;
    mm_scope scope;
    mm_status st;

    if (can_copy(f) && enter_capture(f, stream, &scope, &v)) {
        use = capture_entered(f, number, &v, &st);
        mm_scope_leave(&scope);
    }
    return use;
}

static int
add_copy_home(mm_frames *f, frame_capture *c, const capture_view *v, ring_frame *frame,
              CUgraphNode *node, mm_status *st)
{
    const CUdeviceptr home = f->parts[frame->part].home;
    node_list behind = {0};
    int rc = add_nodes(&behind, c->behind.list, c->behind.count, st);

    rc = rc == 0 ? add_nodes(&behind, frame->ends.list, frame->ends.count, st) : rc;
    rc = rc == 0 ? add_nodes(&behind, v->front, v->count, st) : rc;
    if (rc == 0) {
        rc = add_copy(f, c, v, home, f->slab->start + frame->offset, frame->bytes, &behind, node,
                      st);
    }
    free(behind.list);
    return rc;
}

/* Copies a part home, behind all of its uses. If that fails, a query of the stream breaks the
 * capture, because its graph would lose the write. Under the lock, in a scope of the stream. */
static void
send_home(mm_frames *f, frame_capture *c, const capture_view *v, ring_frame *frame)
{
    CUgraphNode node = NULL;
    mm_status st;

    if (add_copy_home(f, c, v, frame, &node, &st) < 0) {
        MM_IGNORE(f->cu->StreamQuery(v->stream));
        f->report.failures++;
        f->report.error = st;
        return;
    }
    f->parts[frame->part].is_written_by_graph = true;
    if (follow_node(f, v, &node, &st) < 0) {
        MM_IGNORE(follow_node(f, v, &node, &st)); /* the second attempt */
    }
}

/* Under the lock, in a scope of the stream. */
static void
end_use(mm_frames *f, frame_capture *c, const capture_view *v, ring_frame *frame, bool written,
        bool goes_on)
{
    mm_status ignored;

    frame->is_lost = frame->is_lost || add_nodes(&frame->ends, v->front, v->count, &ignored) < 0;
    if (written && f->parts[frame->part].access != MM_PART_SCRATCH) {
        send_home(f, c, v, frame);
    }
    frame->held -= goes_on || frame->is_lost ? 0 : 1;
}

/* The frame of a use and its capture; NULL if the graph is gone. Under the lock. */
static ring_frame *
find_used(const mm_frames *f, mm_part_use use, frame_capture **capture)
{
    for (frame_capture *c = f->captures; c != NULL; c = c->next) {
        for (size_t i = 0; i < c->count && !atomic_load(&c->is_gone); i++) {
            if (c->frames[i].number == use.frame && c->frames[i].part == use.part) {
                *capture = c;
                return &c->frames[i];
            }
        }
    }
    return NULL;
}

/* Ends a use in its capture; false after the capture. */
static bool
end_in_capture(mm_frames *f, mm_part_use use, bool written, bool goes_on, mm_device_stream stream)
{
    frame_capture *c = NULL;
    ring_frame *open;
    capture_view v;
    mm_scope scope;
    bool ended;

    if (!enter_capture(f, stream, &scope, &v)) {
        return false;
    }
    mm_frames_lock(f);
    open = find_used(f, use, &c);
    ended = open != NULL && c->id == v.id;
    if (ended) {
        end_use(f, c, &v, open, written, goes_on);
    }
    mm_frames_unlock(f);
    mm_scope_leave(&scope);
    return ended;
}

void
mm_frames_end_captured(mm_frames *f, mm_part_use use, bool written, bool goes_on,
                       mm_device_stream stream)
{
    frame_capture *ignored = NULL;
    ring_frame *open;

    if (end_in_capture(f, use, written, goes_on, stream)) {
        return;
    }
    mm_frames_lock(f);
    open = find_used(f, use, &ignored);
    if (open != NULL) { /* no node can be added any more */
        open->is_lost = !goes_on;
    }
    if (written && f->parts[use.part].access != MM_PART_SCRATCH) {
        f->report.failures++;
        (void)mm_fail(&f->report.error, MM_REFUSED,
                      "a use that began in a graph capture ended after it, so that replays do "
                      "not copy home what it writes: end the use before the capture ends");
    }
    mm_frames_unlock(f);
}

void
mm_frames_follow_captured(mm_frames *f, mm_device_stream stream)
{
    capture_view v = {0};
    mm_status ignored;
    mm_scope scope;
    const bool entered = can_copy(f) && enter_capture(f, stream, &scope, &v);

    mm_frames_lock(f);
    for (frame_capture *c = f->captures; c != NULL; c = c->next) {
        c->is_blind = c->is_blind || !entered
                      || (c->id == v.id && add_nodes(&c->behind, v.front, v.count, &ignored) < 0);
    }
    mm_frames_unlock(f);
    if (entered) {
        mm_scope_leave(&scope);
    }
}
