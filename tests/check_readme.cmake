# The README shows examples/quickstart.cpp as it is, so that what people copy is what was compiled.
set(root ${CMAKE_CURRENT_LIST_DIR}/..)
file(READ ${root}/README.md readme)
file(READ ${root}/examples/quickstart.cpp program)
string(REGEX REPLACE "^//[^\n]*\n" "" program "${program}")
string(FIND "${readme}" "```cpp\n${program}```" found)
if(found EQUAL -1)
  message(FATAL_ERROR "README.md does not show examples/quickstart.cpp as it is")
endif()
