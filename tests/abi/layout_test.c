/* The layout of a frozen header beside the header that this is compiled with: offsets, sizes, constants and functions stay.
 * Structs that may grow have at least their old bytes. */
#include <fastweight/fastweight.h>
#include <stdio.h>

typedef void (*function)(void);
static int failures = 0;

static void expect(int holds, const char* what, unsigned long expected, unsigned long got) {
  if (holds) return;
  fprintf(stderr, "layout_test: %s: expected %lu as in the frozen header, got %lu\n", what, expected, got);
  ++failures;
}

int main(void) {
  int checked = 0;
  volatile function pointer; /* of a function that the linker found */
#define FW_STRUCT(name, bytes, grows)                                                             \
  expect((grows) ? sizeof(name) >= (bytes) : sizeof(name) == (bytes), "sizeof(" #name ")", bytes, \
         (unsigned long)sizeof(name)),                                                            \
      ++checked;
#define FW_FIELD(name, field, place, bytes)                                                            \
  expect(offsetof(name, field) == (place), #name "." #field ": offset", place, offsetof(name, field)); \
  expect(sizeof(((name*)0)->field) == (bytes), #name "." #field ": bytes", bytes,                      \
         (unsigned long)sizeof(((name*)0)->field)),                                                    \
      ++checked;
#define FW_VALUE(name, number) expect((int)(name) == (number), #name, number, (unsigned long)(name)), ++checked;
#define FW_FUNCTION(name) pointer = (function)name, expect(pointer != (function)0, #name, 1, 0), ++checked;
#include "layout.inc"
  if (checked < 200) {
    fprintf(stderr, "layout_test: expected at least 200 lines in layout.inc, got %d\n", checked);
    return 1;
  }
  printf("layout_test: %d lines, %d differ\n", checked, failures);
  return failures != 0;
}
