/* Counts live heap bytes exactly, from every thread: preloaded, it stands in front of glibc's allocator.

   Two kinds are kept apart: 0 = posix_memalign and its family, which is how torch's CPU allocator (and oneDNN) asks for
   memory; 1 = malloc, calloc, realloc: gloo's buffers, numpy, Python. Requests below FLOOR bytes are not counted.
   Built and read by _heap.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SLOTS = 1 << 20, FLOOR = 1024, CLASSES = 4096, CLASS_FLOOR = 65536 };
typedef struct { uintptr_t at; size_t size; int kind; } Slot;
typedef struct { size_t size, count; } Class;

static Slot table[SLOTS];
static size_t used;
static size_t live[2], peak; /* peak is that of kind 0 */
static size_t malloc_at_peak;
static Class classes[CLASSES], at_peak[CLASSES];
static int num_classes, num_at_peak;
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void enter(void) { while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {} }
static void leave(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }
static size_t home(uintptr_t at) { return (size_t)((at >> 4) * 0x9E3779B97F4A7C15ull >> 44); }

static void tally(size_t size, int sign) {
    int i = 0;
    if (size < CLASS_FLOOR) return;
    while (i < num_classes && classes[i].size != size) i++;
    if (i == num_classes) {
        if (num_classes == CLASSES) return;
        classes[num_classes++].size = size;
    }
    classes[i].count += sign;
}

static void mark_peak(void) {
    peak = live[0];
    malloc_at_peak = live[1];
    num_at_peak = num_classes;
    memcpy(at_peak, classes, sizeof(Class) * num_classes);
}

static void add(void *p, size_t size, int kind) {
    size_t i;
    if (!p || size < FLOOR) return;
    enter();
    if (used < SLOTS / 2) {
        for (i = home((uintptr_t)p); table[i].at; i = (i + 1) % SLOTS) {}
        table[i] = (Slot){(uintptr_t)p, size, kind};
        used++;
        live[kind] += size;
        if (kind == 0) {
            tally(size, 1);
            if (live[0] > peak) mark_peak();
        }
    }
    leave();
}

static void drop(void *p) {
    size_t i, j, k;
    if (!p || malloc_usable_size(p) < FLOOR) return;
    enter();
    for (i = home((uintptr_t)p); table[i].at && table[i].at != (uintptr_t)p; i = (i + 1) % SLOTS) {}
    if (table[i].at) {
        live[table[i].kind] -= table[i].size;
        if (table[i].kind == 0) tally(table[i].size, -1);
        used--;
        for (j = (i + 1) % SLOTS; table[j].at; j = (j + 1) % SLOTS) { /* close the gap of linear probing */
            k = home(table[j].at);
            if ((j > i) ? (k <= i || k > j) : (k <= i && k > j)) { table[i] = table[j]; i = j; }
        }
        table[i] = (Slot){0, 0, 0};
    }
    leave();
}

void *malloc(size_t n) { void *p = __libc_malloc(n); add(p, n, 1); return p; }
void *calloc(size_t m, size_t n) { void *p = __libc_calloc(m, n); add(p, m * n, 1); return p; }
void *realloc(void *p, size_t n) { drop(p); p = __libc_realloc(p, n); add(p, n, 1); return p; }
void *memalign(size_t a, size_t n) { void *p = __libc_memalign(a, n); add(p, n, 0); return p; }
void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }
int posix_memalign(void **out, size_t a, size_t n) { *out = memalign(a, n); return *out || !n ? 0 : ENOMEM; }
void free(void *p) { int e = errno; drop(p); __libc_free(p); errno = e; }

size_t heap_live(int kind) { return live[kind]; }
size_t heap_peak(void) { return peak; }
size_t heap_malloc_at_peak(void) { return malloc_at_peak; }
void heap_reset_peak(void) { enter(); mark_peak(); leave(); }
int heap_classes_at_peak(size_t *sizes, size_t *counts, int room) {
    int i, n = 0;
    enter();
    for (i = 0; i < num_at_peak && n < room; i++)
        if (at_peak[i].count) { sizes[n] = at_peak[i].size; counts[n++] = at_peak[i].count; }
    leave();
    return n;
}
