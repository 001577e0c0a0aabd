// LD_PRELOAD: a log of what a program has synced, for durability_test.cpp. A power cut keeps of a file what fsync was
// called for, and of a folder the names that it had at its last fsync. Lines of the log, $FW_SYNC_LOG:
//   file DEVICE INODE SIZE MTIME     fsync of a file, which then had this size and time (ns)
//   folder DEVICE INODE              fsync of a folder
//   rename DEVICE INODE NAME         a rename to NAME in the folder of this number
// With $FW_LOSE_SYNC no fsync is called or logged: a program that forgot them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void put(const char* line, int size) {
  const char* path = getenv("FW_SYNC_LOG");
  if (path == NULL || size <= 0) return;
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (write(fd, line, (size_t)size) != size) abort();
  close(fd);
}

static int synced(int fd, int (*call)(int)) {
  char line[128];
  struct stat info;
  if (getenv("FW_LOSE_SYNC") != NULL) return 0;
  const int result = call(fd);
  if (result != 0 || fstat(fd, &info) != 0) return result;
  const unsigned long device = (unsigned long)info.st_dev, inode = (unsigned long)info.st_ino;
  if (S_ISDIR(info.st_mode)) {
    put(line, snprintf(line, sizeof line, "folder %lu %lu\n", device, inode));
  } else {
    const long long time = (long long)info.st_mtim.tv_sec * 1000000000LL + info.st_mtim.tv_nsec;
    put(line, snprintf(line, sizeof line, "file %lu %lu %lld %lld\n", device, inode, (long long)info.st_size, time));
  }
  return result;
}

int fsync(int fd) {
  int (*call)(int);
  *(void**)&call = dlsym(RTLD_NEXT, "fsync");
  return synced(fd, call);
}

int fdatasync(int fd) {
  int (*call)(int);
  *(void**)&call = dlsym(RTLD_NEXT, "fdatasync");
  return synced(fd, call);
}

int rename(const char* from, const char* to) {
  int (*call)(const char*, const char*);
  *(void**)&call = dlsym(RTLD_NEXT, "rename");
  const int result = call(from, to);
  char folder[4096], line[4352];
  struct stat info;
  if (result != 0 || strlen(to) >= sizeof folder) return result;
  strcpy(folder, to);
  char* slash = strrchr(folder, '/');
  const char* name = slash != NULL ? to + (slash - folder) + 1 : to;
  if (slash != NULL) *slash = '\0';
  if (stat(slash != NULL ? folder : ".", &info) != 0) return result;
  put(line,
      snprintf(line, sizeof line, "rename %lu %lu %s\n", (unsigned long)info.st_dev, (unsigned long)info.st_ino, name));
  return result;
}
