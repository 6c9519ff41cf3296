# Provides the target leanopt::compiled, to be linked instead of leanopt::leanopt by programs of many
# sources: a static library of the classes of leanopt.hpp, so that sources that use them compile
# little slower than with LibTorch's (run_compile_bench). A program links one of the two, not both. It is built by the project that
# links it, with its compiler, LibTorch and flags, and not at all where none does; optimized in Debug
# builds too. The build of leanopt and the installed package both use this file.
function(leanopt_provide_compiled)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(TARGET leanopt::compiled OR NOT "CXX" IN_LIST languages)
    return()
  endif()
  add_library(leanopt_compiled STATIC EXCLUDE_FROM_ALL
              ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/compiled.cpp)
  add_library(leanopt::compiled ALIAS leanopt_compiled)
  target_link_libraries(leanopt_compiled PUBLIC leanopt::leanopt)
  target_compile_definitions(leanopt_compiled PUBLIC LEANOPT_COMPILED)
  target_compile_options(leanopt_compiled PRIVATE
    $<$<NOT:$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:-O2>)
  set_target_properties(leanopt_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()
