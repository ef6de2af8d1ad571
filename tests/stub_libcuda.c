/* A stand-in for libcuda.so.1: remembers what it was asked, so launches can be checked without a GPU.
   STUB_SM: compute capability of its devices (default 90), and with it their shared memory. STUB_DEVICES: how many (default 2).
   STUB_FAIL: name of a function that answers CUDA_ERROR_OUT_OF_MEMORY (2).
   With -DCUDA_12_4 it also has what came with that: cuKernelGetParamInfo, which claims
   STUB_PARAM_BYTES each, and cuFuncLoad. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { MAX_RECORDS = 100000, MAX_LOADS = 4096, MAX_PARAMS = 64 };

struct config { unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared; void *stream; };
struct load { const unsigned char *image; char symbol[64]; int shared, completed; };
struct map { uint64_t address; uint64_t extents[3], strides[2]; unsigned box[3]; int rank, type, swizzle; };
struct record {
  int load, context;
  unsigned grid, block, shared;
  uint64_t stream;
  uint64_t params[MAX_PARAMS];
};

static struct load loads[MAX_LOADS];
static struct record records[MAX_RECORDS];
static struct map maps[MAX_RECORDS];
static int num_loads, num_records, num_params, num_maps, num_memsets;
static uint64_t last_memset;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread uintptr_t stack[16];
static __thread int depth;

static int env(const char *name, int otherwise) { char *v = getenv(name); return v ? atoi(v) : otherwise; }
static CUresult answer(const char *name) {
  char *fail = getenv("STUB_FAIL");
  return fail && !strcmp(fail, name) ? 2 : 0;
}

/* for the test */
int stub_num_loads(void) { return num_loads; }
struct load *stub_load(int i) { return &loads[i]; }
int stub_num_records(void) { return num_records; }
struct record *stub_record(int i) { return &records[i]; }
/* As many as the kernel has, scratch included: a launch reads so many pointers. */
void stub_expect_params(int n) { num_params = n; }
int stub_num_maps(void) { return num_maps; }
struct map *stub_map(int i) { return &maps[i]; }
int stub_num_memsets(void) { return num_memsets; }
uint64_t stub_last_memset(void) { return last_memset; }
int stub_context_depth(void) { return depth; }

/* the driver */
CUresult cuInit(unsigned flags) { (void)flags; return answer("cuInit"); }
CUresult cuGetErrorName(CUresult e, const char **s) {
  *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
CUresult cuDeviceGet(int *d, int i) { *d = i; return 0; }
CUresult cuDeviceGetCount(int *n) { *n = env("STUB_DEVICES", 2); return 0; }
CUresult cuDeviceGetName(char *s, int n, int d) { (void)d; strncpy(s, "Stub GPU", n); return 0; }
CUresult cuDeviceGetAttribute(int *v, int attribute, int d) {
  (void)d;
  *v = attribute == 16 ? 132 : attribute == 75 ? env("STUB_SM", 90) / 10 : env("STUB_SM", 90) % 10;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(uintptr_t)(1000 + d); return 0; }
CUresult cuCtxGetCurrent(void **c) { *c = depth ? (void *)stack[depth - 1] : 0; return 0; }
CUresult cuCtxPushCurrent_v2(void *c) { stack[depth++] = (uintptr_t)c; return 0; }
CUresult cuCtxPopCurrent_v2(void **c) { *c = (void *)stack[--depth]; return 0; }
CUresult cuLibraryLoadData(void **lib, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  (void)a; (void)b; (void)c; (void)d; (void)e; (void)f;
  pthread_mutex_lock(&lock);
  loads[num_loads].image = image;
  *lib = (void *)(uintptr_t)(++num_loads);
  pthread_mutex_unlock(&lock);
  return answer("cuLibraryLoadData");
}
CUresult cuLibraryGetKernel(void **kernel, void *lib, const char *name) {
  strncpy(loads[(uintptr_t)lib - 1].symbol, name, 63);
  *kernel = lib;
  return 0;
}
CUresult cuKernelGetFunction(void **f, void *kernel) { *f = kernel; return depth ? 0 : 201; }
CUresult cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  (void)device;
  int sm = env("STUB_SM", 90);
  int limit = sm == 80 || sm == 87 ? 163 : sm < 90 || sm >= 120 ? 99 : 227; /* KiB a block may have */
  if (attribute == 8 && value > limit * 1024) return 1;
  if (attribute == 8) loads[(uintptr_t)kernel - 1].shared = value;
  return 0;
}
CUresult cuMemsetD32Async(uint64_t at, unsigned value, size_t count, void *stream) {
  (void)stream;
  if (!depth || value || count != 1) return 201;
  pthread_mutex_lock(&lock);
  last_memset = at;
  ++num_memsets;
  pthread_mutex_unlock(&lock);
  return answer("cuMemsetD32Async");
}
CUresult cuTensorMapEncodeTiled(void *out, int type, unsigned rank, void *address, const uint64_t *extents,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps,
                                int interleave, int swizzle, int promotion, int fill) {
  (void)steps; (void)promotion;
  if (!depth) return 201; /* as the real driver: autograd's threads have no context */
  if (interleave || fill || (uintptr_t)out % 64) return 1;
  pthread_mutex_lock(&lock);
  struct map *m = &maps[num_maps++ % MAX_RECORDS];
  m->address = (uint64_t)address; m->rank = rank; m->type = type; m->swizzle = swizzle;
  for (unsigned i = 0; i < rank; ++i) { m->extents[i] = extents[i]; m->box[i] = box[i]; }
  for (unsigned i = 0; i + 1 < rank; ++i) m->strides[i] = strides[i];
  pthread_mutex_unlock(&lock);
  return answer("cuTensorMapEncodeTiled");
}
#ifdef CUDA_12_4
CUresult cuFuncLoad(void *function) {
  if (!depth) return 201;
  pthread_mutex_lock(&lock);
  ++loads[(uintptr_t)function - 1].completed;
  pthread_mutex_unlock(&lock);
  return answer("cuFuncLoad");
}
CUresult cuKernelGetParamInfo(void *kernel, size_t i, size_t *offset, size_t *size) {
  (void)kernel; (void)i;
  if (!depth) return 201; /* as the real driver answers on a thread without a context */
  *offset = 0;
  *size = env("STUB_PARAM_BYTES", 8);
  return 0;
}
#endif
CUresult cuLaunchKernelEx(const struct config *c, void *kernel, void **params, void **extra) {
  (void)extra;
  if (!depth) return 201;
  pthread_mutex_lock(&lock);
  struct record *r = &records[num_records++];
  r->load = (int)(uintptr_t)kernel - 1;
  r->context = (int)stack[depth - 1];
  r->grid = c->grid_x; r->block = c->block_x; r->shared = c->shared;
  r->stream = (uint64_t)c->stream;
  for (int i = 0; i < num_params; ++i) memcpy(&r->params[i], params[i], 4);
  pthread_mutex_unlock(&lock);
  return answer("cuLaunchKernelEx");
}
