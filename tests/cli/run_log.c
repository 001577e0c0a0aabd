// LD_PRELOAD: a log of what a process starts and loads, for ahead_of_time_test.cpp. Lines of the log, $FW_RUN_LOG:
//   start NAME   a program that the process, or a fork of it, executes or spawns
//   load PATH    a library that is in the process when it ends
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put(const char* kind, const char* name) {
  char line[4352];
  const char* path = getenv("FW_RUN_LOG");
  const int size = snprintf(line, sizeof line, "%s %s\n", kind, name);
  if (path == NULL || size <= 0 || (size_t)size >= sizeof line) return;
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (write(fd, line, (size_t)size) != size) abort();
  close(fd);
}

#define NEXT(name, ...)            \
  static int (*call)(__VA_ARGS__); \
  *(void**)&call = dlsym(RTLD_NEXT, #name)

int execve(const char* path, char* const argv[], char* const envp[]) {
  NEXT(execve, const char*, char* const[], char* const[]);
  put("start", path);
  return call(path, argv, envp);
}
int execv(const char* path, char* const argv[]) {
  NEXT(execv, const char*, char* const[]);
  put("start", path);
  return call(path, argv);
}
int execvp(const char* file, char* const argv[]) {
  NEXT(execvp, const char*, char* const[]);
  put("start", file);
  return call(file, argv);
}
int execvpe(const char* file, char* const argv[], char* const envp[]) {
  NEXT(execvpe, const char*, char* const[], char* const[]);
  put("start", file);
  return call(file, argv, envp);
}
int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attr,
                char* const argv[], char* const envp[]) {
  NEXT(posix_spawn, pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, char* const[],
       char* const[]);
  put("start", path);
  return call(pid, path, actions, attr, argv, envp);
}
int posix_spawnp(pid_t* pid, const char* file, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attr,
                 char* const argv[], char* const envp[]) {
  NEXT(posix_spawnp, pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, char* const[],
       char* const[]);
  put("start", file);
  return call(pid, file, actions, attr, argv, envp);
}
int system(const char* command) {
  NEXT(system, const char*);
  put("start", command == NULL ? "sh" : command);
  return call(command);
}
FILE* popen(const char* command, const char* type) {
  static FILE* (*call)(const char*, const char*);
  *(void**)&call = dlsym(RTLD_NEXT, "popen");
  put("start", command);
  return call(command, type);
}

static int put_library(struct dl_phdr_info* info, size_t size, void* data) {
  (void)size, (void)data;
  if (info->dlpi_name[0] != '\0') put("load", info->dlpi_name);
  return 0;
}
__attribute__((destructor)) static void at_end(void) { dl_iterate_phdr(put_library, NULL); }
