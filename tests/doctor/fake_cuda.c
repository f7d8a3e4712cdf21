// As much of CUDA's driver as the doctor asks, over files: device memory is a file that other processes map by its name.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>

typedef struct { char reserved[64]; } Handle;
static char path[64];
static void *held;
static int fails(const char *what) { const char *named = getenv("FAKE_CUDA_FAILS"); return named && !strcmp(named, what); }
static void *map(const char *name, int flags) {
    int fd = open(name, O_RDWR | flags, 0600);
    if (fd < 0 || ftruncate(fd, 2 << 20)) return 0;
    void *at = mmap(0, 2 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? 0 : at;
}
int cuInit(unsigned flags) { if (fails("abort")) abort(); return fails("init") ? 803 : flags ? 1 : 0; }
int cuGetErrorName(int code, const char **name) { *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "CUDA_ERROR_OTHER"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }
int cuDeviceGetName(char *name, int n, int device) { snprintf(name, n, "Fake %d", device); return 0; }
int cuDeviceGetPCIBusId(char *address, int n, int device) { snprintf(address, n, "0000:%02X:00.0", 0x1b + device); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int device) { (void)device; *n = 80ull << 30; return 0; }
int cuDeviceGetAttribute(int *value, int what, int device) { (void)device; *value = what == 75 ? 9 : 0; return 0; }
int cuDeviceCanAccessPeer(int *can, int from, int to) { *can = !fails("peer") || from > to; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(device + 1); return 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuMemAlloc_v2(void **at, size_t n) {
    snprintf(path, sizeof path, "/dev/shm/pdstage-fake-cuda-%d", getpid());
    unlink(path);  // of a process that had this number and was killed
    *at = held = n == 2 << 20 ? map(path, O_CREAT | O_EXCL) : 0;
    return held ? 0 : 2;
}
int cuMemcpyHtoD_v2(void *dst, const void *src, size_t n) { memcpy(dst, src, n); return 0; }
int cuMemcpyDtoH_v2(void *dst, const void *src, size_t n) { memcpy(dst, src, n); return 0; }
int cuIpcGetMemHandle(Handle *handle, void *at) { if (at != held) return 1; memcpy(handle->reserved, path, 64); return 0; }
int cuIpcOpenMemHandle_v2(void **at, Handle handle, unsigned flags) {
    *at = flags == 1 ? map(handle.reserved, 0) : 0;
    unlink(handle.reserved);
    if (fails("ipc")) return 999;
    if (*at && fails("bytes")) *(char *)*at ^= 1;
    return *at ? 0 : 1;
}
int cuIpcCloseMemHandle(void *at) { return munmap(at, 2 << 20); }
