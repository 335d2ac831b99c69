// A library to preload, which lets one system call of a process fail or kills the process there: the Nth of those that
// touch files under a folder. `faulty_io.py` drives it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KILL (-1)

static char folder[PATH_MAX];
static atomic_long calls, fails_at;
static int fault;

// Counts from now on. The call number `at` fails with `error`, or ends the process where that is -1; none where `at` is 0.
void faulty_arm(const char *path, long at, int error) {
  snprintf(folder, sizeof(folder), "%s/", path);
  fails_at = at;
  fault = error;
  calls = 0;
}

long faulty_calls(void) { return calls; }

// The processes that this one starts are as always.
__attribute__((constructor)) static void only_here(void) { unsetenv("LD_PRELOAD"); }

static int is_inside(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }

static int is_inside_fd(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder[0]) return 0;
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 2);
  if (length < 0) return 0;
  path[length] = '/', path[length + 1] = 0;  // the folder itself counts too
  return is_inside(path);
}

// Whether this call is to fail, with errno set.
static int strikes(int counts) {
  if (!counts || atomic_fetch_add(&calls, 1) + 1 != fails_at) return 0;
  if (fault == KILL) kill(getpid(), SIGKILL);
  errno = fault;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(name, parameters, path, ...)   \
  int name parameters {                        \
    if (strikes(is_inside(path))) return -1;   \
    return REAL(name)(__VA_ARGS__);            \
  }
#define ON_FILE(name, parameters, ...)         \
  int name parameters {                        \
    if (strikes(is_inside_fd(fd))) return -1;  \
    return REAL(name)(__VA_ARGS__);            \
  }
#define OPENS(name)                                                     \
  int name(const char *path, int flags, ...) {                          \
    va_list rest;                                                       \
    va_start(rest, flags);                                              \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;     \
    va_end(rest);                                                       \
    if (strikes(is_inside(path))) return -1;                            \
    return REAL(name)(path, flags, mode);                               \
  }

int flock(int fd, int operation);

OPENS(open)
OPENS(open64)
ON_PATH(mkdir, (const char *path, mode_t mode), path, path, mode)
ON_PATH(rmdir, (const char *path), path, path)
ON_PATH(unlink, (const char *path), path, path)
ON_PATH(rename, (const char *from, const char *to), to, from, to)
ON_FILE(unlinkat, (int fd, const char *path, int flags), fd, path, flags)
ON_FILE(fsync, (int fd), fd)
ON_FILE(flock, (int fd, int operation), fd, operation)
ON_FILE(ftruncate, (int fd, off_t length), fd, length)

// A write that fails has written half, as on a disk that becomes full.
ssize_t write(int fd, const void *data, size_t size) {
  if (fails_at && is_inside_fd(fd) && calls + 1 == fails_at && fault != EINTR) REAL(write)(fd, data, size / 2);
  if (strikes(is_inside_fd(fd))) return -1;
  return REAL(write)(fd, data, size);
}

// A close that fails has closed the file all the same.
int close(int fd) {
  const int counts = is_inside_fd(fd);
  if (counts && calls + 1 == fails_at && fault != KILL) REAL(close)(fd);
  if (strikes(counts)) return -1;
  return REAL(close)(fd);
}
