# Counts the instructions of each step that `kernels` makes, with valgrind, and compares them with
# those in instructions.txt: a kernel that needs more than 3 % above its figure fails. Called with
# PROGRAM, COMPILER (its name and main version), VALGRIND and SCRATCH, a folder; with RENEW=ON it
# writes the figures instead.
cmake_policy(VERSION 3.24)
set(figures ${CMAKE_CURRENT_LIST_DIR}/instructions.txt)
set(most_percent 103)

file(STRINGS ${figures} lines REGEX "^[^#]")
list(POP_FRONT lines known_compiler)
if(NOT VALGRIND)
  message(STATUS "skipped: no valgrind (Debian: apt-get install valgrind)")
  return()
elseif(NOT COMPILER STREQUAL known_compiler AND NOT RENEW)
  message(STATUS "skipped: the figures are those of ${known_compiler}, this is ${COMPILER}")
  return()
endif()

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
execute_process(
  COMMAND ${VALGRIND} --tool=callgrind --callgrind-out-file=${SCRATCH}/counts
          --dump-after=dump_counts* ${PROGRAM}
  OUTPUT_VARIABLE steps ERROR_VARIABLE messages RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "valgrind failed; a step with an instruction that it does not know cannot be "
                      "counted: ${messages}")
endif()

set(renewed "")
set(faults "")
set(dump 0)
string(REGEX MATCHALL "[^\n]+" steps "${steps}")
foreach(step IN LISTS steps)
  string(REPLACE " " ";" step "${step}")
  list(GET step 0 name)
  list(GET step 1 parameters)
  math(EXPR dump "${dump} + 2") # every other one is of what lies between two steps
  file(STRINGS ${SCRATCH}/counts.${dump} total REGEX "^totals:")
  string(REGEX REPLACE "[^0-9]" "" total "${total}")
  math(EXPR count "${total} * 1000 / ${parameters}")
  string(APPEND renewed "${name} ${count}\n")

  set(figure "${lines}")
  list(FILTER figure INCLUDE REGEX "^${name} [0-9]+$")
  string(REGEX REPLACE "^.* " "" figure "${figure}")
  message(STATUS "${name}: ${count} instructions per 1000 parameters, figure ${figure}")
  if(NOT figure)
    list(APPEND faults "${name} has no figure")
    continue()
  endif()
  math(EXPR limit "${figure} * ${most_percent}")
  math(EXPR hundredfold "${count} * 100")
  if(hundredfold GREATER limit)
    list(APPEND faults "${name} takes ${count} instructions, the figure is ${figure}")
  endif()
endforeach()
list(LENGTH steps count)
list(LENGTH lines known_count)
if(NOT count EQUAL known_count)
  list(APPEND faults "${count} steps were counted, there are figures for ${known_count}")
endif()

if(RENEW)
  file(READ ${figures} text)
  string(REGEX MATCHALL "#[^\n]*\n" comment "${text}")
  string(JOIN "" comment ${comment})
  file(WRITE ${figures} "${comment}${COMPILER}\n${renewed}")
elseif(faults)
  list(JOIN faults "\n  " faults)
  message(FATAL_ERROR "${faults}")
endif()
