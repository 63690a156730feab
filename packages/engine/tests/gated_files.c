/* Preloaded into a process, it makes opening PATH wait for as long as there is PATH.closed.
   PATH.waits tells that it does. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int opened(int directory, const char *path, int flags, int mode) {
  char closed[PATH_MAX + 8], waits[PATH_MAX + 8];
  if (strstr(path, "adapter_model.safetensors") && strlen(path) < PATH_MAX) {
    snprintf(closed, sizeof closed, "%s.closed", path);
    snprintf(waits, sizeof waits, "%s.waits", path);
    while (access(closed, F_OK) == 0) {
      int number = syscall(SYS_openat, AT_FDCWD, waits, O_CREAT | O_WRONLY, 0600);
      if (number >= 0) close(number);
      usleep(1000);
    }
  }
  return syscall(SYS_openat, directory, path, flags, mode);
}

#define MODE(flags, mode)                \
  int mode = 0;                          \
  if (flags & (O_CREAT | O_TMPFILE)) {   \
    va_list arguments;                   \
    va_start(arguments, flags);          \
    mode = va_arg(arguments, int);       \
    va_end(arguments);                   \
  }

int open(const char *path, int flags, ...) {
  MODE(flags, mode)
  return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE(flags, mode)
  return opened(AT_FDCWD, path, flags, mode);
}
