// Memory for NumPy arrays (NEP 49) that ends where an unmapped page begins: a kernel that reads or writes beyond the
// end of an operand stops the process. Vector loads with masks are caught too, which AddressSanitizer does not watch.
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
  char* start;  // of the mapping
  size_t length, size;
} Block;

enum { kAlignment = 16, kHead = 32 };
_Static_assert(sizeof(Block) <= kHead, "a block's head lies before its data");

static size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

static void* guarded_malloc(void* context, size_t size) {
  (void)context;
  const size_t page = getpagesize();
  const size_t padded = round_up(size, kAlignment), length = round_up(padded + kHead, page) + page;
  if (padded < size || length < padded) return NULL;
  char* start = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return NULL;
  mprotect(start + length - page, page, PROT_NONE);
  char* data = start + length - page - padded;
  *(Block*)(data - kHead) = (Block){start, length, size};
  memset(data + size, 0xff, padded - size);  // NaN, or as good as
  return data;
}

static void guarded_free(void* context, void* data, size_t size) {
  (void)context, (void)size;
  if (data == NULL) return;
  const Block block = *(Block*)((char*)data - kHead);
  munmap(block.start, block.length);
}

static void* guarded_calloc(void* context, size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) return NULL;
  return guarded_malloc(context, bytes);  // pages are zero as they come
}

static void* guarded_realloc(void* context, void* data, size_t size) {
  void* moved = guarded_malloc(context, size);
  if (moved == NULL || data == NULL) return moved;
  const size_t before = ((Block*)((char*)data - kHead))->size;
  memcpy(moved, data, before < size ? before : size);
  guarded_free(context, data, before);
  return moved;
}

// PyDataMem_Handler of numpy/ndarraytypes.h
struct {
  char name[127];
  uint8_t version;
  void* context;
  void* (*malloc)(void*, size_t);
  void* (*calloc)(void*, size_t, size_t);
  void* (*realloc)(void*, void*, size_t);
  void (*free)(void*, void*, size_t);
} guarded_arrays = {"guarded arrays", 1, NULL, guarded_malloc, guarded_calloc, guarded_realloc, guarded_free};
