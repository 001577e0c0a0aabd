# The commit that a program is built of, for its reports. fw_commit(TARGET): a header cli/commit.h for the target, with FW_COMMIT, looked up by every build
# and written where it changed. It is "" where the sources are no checkout of git; after the commit stands "+" where files that git knows differ from it.
#   cmake -DSOURCE=... -DOUT=... -P FastweightCommit.cmake     the lookup itself
if(CMAKE_SCRIPT_MODE_FILE)
  set(commit "")
  find_program(git_program git)
  if(git_program AND EXISTS ${SOURCE}/.git)
    execute_process(COMMAND ${git_program} -C ${SOURCE} rev-parse --short=8 HEAD OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    execute_process(COMMAND ${git_program} -C ${SOURCE} diff --quiet HEAD RESULT_VARIABLE differs ERROR_QUIET)
    if(commit AND differs)
      string(APPEND commit "+")
    endif()
  endif()
  file(CONFIGURE OUTPUT ${OUT} CONTENT "#define FW_COMMIT \"${commit}\"\n")
  return()
endif()

function(fw_commit target)
  set(header ${PROJECT_BINARY_DIR}/generated/cli/commit.h)
  set(lookup ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUT=${header} -P ${PROJECT_SOURCE_DIR}/cmake/FastweightCommit.cmake)
  execute_process(COMMAND ${lookup}) # clang-tidy reads a tree that is not built
  add_custom_target(${target}_commit COMMAND ${lookup} BYPRODUCTS ${header} VERBATIM)
  add_dependencies(${target} ${target}_commit)
  target_include_directories(${target} PRIVATE ${PROJECT_BINARY_DIR}/generated)
endfunction()
