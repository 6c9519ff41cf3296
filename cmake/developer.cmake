# What only leanopt's own build needs: warnings, sanitizers, GoogleTest, Google Benchmark, and the
# functions that declare our tests. A consumer never sees this file.
include(FetchContent)
include(GoogleTest)

set(LEANOPT_SANITIZE "" CACHE STRING "Sanitizers for our own programs, e.g. address,undefined")
set(CMAKE_CXX_EXTENSIONS OFF)

# LibTorch's old ABI is a matter of whole programs: all that is linked here needs the same one, so a
# system's GoogleTest is of no use and one is built from source.
get_target_property(abi leanopt::torch INTERFACE_COMPILE_DEFINITIONS)
set(leanopt_old_abi FALSE)
if(NOT abi)
  set(abi "")
elseif(abi MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
  set(leanopt_old_abi TRUE)
  set(FETCHCONTENT_TRY_FIND_PACKAGE_MODE NEVER)
  add_compile_definitions(${abi})
endif()

# System packages are preferred (Debian: libgtest-dev, libbenchmark-dev); without them the sources
# are downloaded. FETCHCONTENT_SOURCE_DIR_GOOGLETEST names a source folder that is at hand.
FetchContent_Declare(googletest
  URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz
  URL_HASH SHA256=8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7
  FIND_PACKAGE_ARGS NAMES GTest)
FetchContent_Declare(benchmark
  URL https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz
  URL_HASH SHA256=6bc180a57d23d4d9515519f92b0c83d61b05b5bab188961f36ac7b06b0d9e9ce
  FIND_PACKAGE_ARGS)
set(BENCHMARK_ENABLE_TESTING OFF CACHE BOOL "Google Benchmark's own tests")
set(INSTALL_GTEST OFF CACHE BOOL "Install GoogleTest along with leanopt")
set(BENCHMARK_ENABLE_INSTALL OFF CACHE BOOL "Install Google Benchmark along with leanopt")
FetchContent_MakeAvailable(googletest)

set(leanopt_quick -O1)
if(LEANOPT_SANITIZE)
  set(leanopt_quick -O0)
endif()

# Warnings as errors, and the sanitizers, for one of our own programs.
function(leanopt_developer_flags target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Werror)
  if(LEANOPT_SANITIZE)
    # g++ 12 sees uninitialized memory in the standard library once it instruments it.
    set(flags -fsanitize=${LEANOPT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer
              -Wno-maybe-uninitialized)
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()

# leanopt_test_program(name SOURCES file... [TORCH] [QUICK])
# A test program that ctest does not know yet, for those that declare their cases with add_test. It
# has GoogleTest and its main; a main of its own takes precedence. TORCH: it includes LibTorch's
# headers; without it, neither LibTorch's headers nor its libraries are within reach. QUICK: it is
# compiled with -O1 instead of -O3, which takes half as long; with sanitizers with -O0, where -O1 takes
# minutes.
function(leanopt_test_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH;QUICK" "" "SOURCES")
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE GTest::gtest GTest::gtest_main)
  leanopt_developer_flags(${name})
  set(headers leanopt_test_headers)
  if(arg_QUICK)
    set(headers leanopt_quick_test_headers)
    target_compile_options(${name} PRIVATE ${leanopt_quick})
  endif()
  if(arg_TORCH)
    target_link_libraries(${name} PRIVATE leanopt::leanopt)
    target_precompile_headers(${name} REUSE_FROM ${headers})
    add_dependencies(torch_tests ${name})
  else()
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include)
    target_compile_features(${name} PRIVATE cxx_std_17)
    add_dependencies(plain_tests ${name})
  endif()
endfunction()

# leanopt_test(name SOURCES file... [TORCH] [QUICK] [LABELS label...] [TIMEOUT seconds])
# A test program each of whose GoogleTest cases is a ctest called name.Suite.Case, with the label
# `torch` or `plain` beside those given. A case may take 120 seconds unless TIMEOUT says otherwise.
function(leanopt_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TORCH;QUICK" "TIMEOUT" "SOURCES;LABELS")
  set(kind "")
  foreach(word TORCH QUICK)
    if(arg_${word})
      list(APPEND kind ${word})
    endif()
  endforeach()
  leanopt_test_program(${name} ${kind} SOURCES ${arg_SOURCES})
  if(arg_TORCH)
    list(APPEND arg_LABELS torch)
  else()
    list(APPEND arg_LABELS plain)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  # Discovery starts the program, which with LibTorch takes half a second, on a busy machine more.
  gtest_discover_tests(${name} TEST_PREFIX ${name}. TEST_LIST ${name}_cases
                       DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120)
  # The properties are set from a file of our own because gtest_discover_tests takes lists apart.
  set(properties ${CMAKE_CURRENT_BINARY_DIR}/${name}_properties.cmake)
  file(CONFIGURE OUTPUT ${properties} @ONLY CONTENT [[
if(@name@_cases)
  set_tests_properties(${@name@_cases} PROPERTIES TIMEOUT @arg_TIMEOUT@ LABELS "@arg_LABELS@")
endif()
]])
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${properties})
endfunction()

# All test programs; those that need LibTorch; those that do not.
add_custom_target(torch_tests)
add_custom_target(plain_tests)
add_custom_target(all_tests DEPENDS torch_tests plain_tests)

# LibTorch's headers cost every unit that includes them 16 to 22 seconds, precompiled a few.
file(WRITE ${PROJECT_BINARY_DIR}/test_headers.cpp "")
foreach(headers leanopt_test_headers leanopt_quick_test_headers)
  add_library(${headers} OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/test_headers.cpp)
  target_link_libraries(${headers} PRIVATE leanopt::torch GTest::gtest)
  target_precompile_headers(${headers} PRIVATE <torch/torch.h> <gtest/gtest.h>)
  leanopt_developer_flags(${headers})
endforeach()
target_compile_options(leanopt_quick_test_headers PRIVATE ${leanopt_quick})
