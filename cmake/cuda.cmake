# Provides the target leanopt::cuda, to be linked instead of leanopt::leanopt by programs that step on
# NVIDIA's devices: a static library of the kernels, and LibTorch's CUDA libraries. It is built by the
# project that links it, and not at all where none does. The build of leanopt and the installed
# package both use this file.
#
# LEANOPT_CUDA=ON demands the target, OFF forgoes it; AUTO, the default, makes it where nvcc and
# LibTorch's CUDA libraries are at hand, so that `if(TARGET leanopt::cuda)` is a question. LEANOPT_NVCC
# is the nvcc; CMAKE_CUDA_ARCHITECTURES, CMAKE_CUDA_HOST_COMPILER and CMAKE_CUDA_FLAGS mean what they
# mean to CMake. Set them before leanopt is included or found.
#
# A command of the build runs nvcc, not CMake's CUDA language: that one takes seconds of every
# configuration, has to be enabled in the topmost folder that links the library, which is not ours,
# and links a CUDA runtime of its own beside LibTorch's.

# Sets `problem` to a sentence for the user where LEANOPT_CUDA=ON cannot be met, else to nothing.
function(leanopt_provide_cuda problem)
  set(${problem} "" PARENT_SCOPE)
  get_property(languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(TARGET leanopt::cuda OR NOT "CXX" IN_LIST languages)
    return()
  endif()
  if(NOT DEFINED LEANOPT_CUDA)
    set(LEANOPT_CUDA AUTO)
  elseif(NOT LEANOPT_CUDA)
    message(STATUS "leanopt: CUDA is off: LEANOPT_CUDA=${LEANOPT_CUDA}")
    return()
  endif()
  _leanopt_find_cuda(reason version toolkit libraries)
  if(reason AND LEANOPT_CUDA STREQUAL AUTO)
    message(STATUS "leanopt: CUDA is off: ${reason}")
  elseif(reason)
    set(${problem} "LEANOPT_CUDA=${LEANOPT_CUDA} cannot be met: ${reason}" PARENT_SCOPE)
  else()
    _leanopt_make_cuda_target(${version} ${toolkit} ${libraries})
  endif()
endfunction()

# Sets `version` and `toolkit` to those of nvcc, `libraries` to LibTorch's two, its CUDA runtime and
# those of the toolkit that it would not find by itself; or `reason` to what is missing.
function(_leanopt_find_cuda reason version toolkit libraries)
  set(${reason} "" PARENT_SCOPE)
  find_program(LEANOPT_NVCC NAMES ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} nvcc
               HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin
               DOC "nvcc, which compiles leanopt's kernels")
  mark_as_advanced(LEANOPT_NVCC)
  # Only nvcc knows where its toolkit is: what is on PATH may be a script.
  execute_process(COMMAND ${LEANOPT_NVCC} --version OUTPUT_VARIABLE version_line ERROR_QUIET)
  execute_process(COMMAND ${LEANOPT_NVCC} --dryrun -x cu -c /dev/null
                  OUTPUT_VARIABLE settings ERROR_VARIABLE settings)
  if(NOT version_line MATCHES "release (([0-9]+)\\.[0-9]+)")
    set(${reason} "there is no nvcc that runs (${LEANOPT_NVCC}). Install NVIDIA's CUDA toolkit, or set \
LEANOPT_NVCC to its nvcc." PARENT_SCOPE)
    return()
  endif()
  set(${version} ${CMAKE_MATCH_1} PARENT_SCOPE)
  set(major ${CMAKE_MATCH_2})
  string(REGEX MATCH "TOP=([^\n]+)" settings "${settings}")
  get_filename_component(folder "${CMAKE_MATCH_1}" ABSOLUTE)

  get_target_property(dir leanopt::torch LEANOPT_TORCH_DIR)
  get_filename_component(home ${dir}/../../.. ABSOLUTE)
  if(NOT EXISTS ${home}/lib/libtorch_cuda.so)
    set(${reason} "the LibTorch of ${dir} has no libtorch_cuda.so. Set CMAKE_PREFIX_PATH to the folder \
of a LibTorch that was built with CUDA." PARENT_SCOPE)
    return()
  endif()
  _leanopt_load(found missing ${home} ${folder})
  if(found AND NOT found MATCHES "^[^;]*\\.so\\.${major}")
    list(GET found 0 runtime)
    set(${reason} "${LEANOPT_NVCC} and LibTorch's ${runtime} are of different CUDA versions. Set \
LEANOPT_NVCC to an nvcc of LibTorch's." PARENT_SCOPE)
    return()
  endif()
  if(missing)
    _leanopt_fetched_home(fetched cache)
    if(NOT home STREQUAL ${fetched}/torch)
      set(remedy "Install torch with all that it depends on: python3 -m pip install torch.")
    elseif(NOT LEANOPT_FETCH_TORCH OR LEANOPT_CUDA STREQUAL AUTO)
      set(remedy "LEANOPT_CUDA=ON with LEANOPT_FETCH_TORCH=ON installs them.")
    else()
      _leanopt_fetch_libraries(remedy ${folder})
      _leanopt_load(found missing ${home} ${folder})
    endif()
  endif()
  if(missing)
    list(JOIN missing ", " missing)
    set(${reason} "${missing}: missing or too old beside LibTorch, in the loader's path and in \
${folder}. ${remedy}" PARENT_SCOPE)
    return()
  endif()

  set(${toolkit} ${folder} PARENT_SCOPE)
  set(${libraries} ${home}/lib/libtorch_cuda.so ${home}/lib/libc10_cuda.so ${found} PARENT_SCOPE)
endfunction()

# Asks the loader for all that LibTorch's CUDA libraries load: from the folders that they name and its
# own path or, where these do not suffice, from the toolkit too. `missing` are names without version;
# the first of `found` is the CUDA runtime, the others are libraries of the toolkit.
function(_leanopt_load found missing home toolkit)
  _leanopt_ldd(lines ${home} "$ENV{LD_LIBRARY_PATH}")
  string(REGEX MATCH "libcudart[^\n]* => (/[^ ]+)" runtime "${lines}")
  set(libraries "")
  if(runtime)
    get_filename_component(libraries ${CMAKE_MATCH_1} ABSOLUTE)
  endif()
  if(lines MATCHES "=> not found")
    _leanopt_ldd(lines ${home} "$ENV{LD_LIBRARY_PATH}:${toolkit}/lib64:${toolkit}/lib")
    string(REGEX MATCHALL "=> /[^ ]+" resolved "${lines}")
    list(TRANSFORM resolved REPLACE "=> " "")
    foreach(library IN LISTS resolved)
      cmake_path(IS_PREFIX toolkit ${library} is_of_toolkit)
      if(NOT is_of_toolkit OR (runtime AND library MATCHES "/libcudart"))
        continue()
      elseif(library MATCHES "/libcudart")
        list(PREPEND libraries ${library})
      else()
        list(APPEND libraries ${library})
      endif()
    endforeach()
  endif()
  list(REMOVE_DUPLICATES libraries)
  set(${found} ${libraries} PARENT_SCOPE)

  # An old NCCL lacks functions that LibTorch calls: nccl and then a capital.
  string(REGEX MATCHALL "[^ \t\n]+ => not found" names "${lines}")
  list(TRANSFORM names REPLACE "\\.so.*" "")
  string(REGEX MATCHALL "undefined symbol: (cu|n)[a-z]+(Lt)?[A-Z]" old "${lines}")
  list(TRANSFORM old REPLACE "undefined symbol: (.*)[A-Z]$" "lib\\1")
  list(APPEND names ${old})
  if(NOT libraries)
    list(APPEND names libcudart)
  endif()
  list(REMOVE_DUPLICATES names)
  set(${missing} ${names} PARENT_SCOPE)
endfunction()

function(_leanopt_ldd lines home path)
  string(REGEX REPLACE "^:" "" path "${path}")
  file(GLOB libraries ${home}/lib/libtorch_cuda*.so)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C LD_LIBRARY_PATH=${path}
                          ldd -r ${libraries}
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  set(${lines} "${output}" PARENT_SCOPE)
endfunction()

# Puts what the pinned LibTorch lacks beside it, where it looks first. Sets `reason` where it cannot.
function(_leanopt_fetch_libraries reason toolkit)
  set(${reason} "" PARENT_SCOPE)
  _leanopt_fetched_home(home cache)
  _leanopt_lock(${cache})
  _leanopt_load(found missing ${home}/torch ${toolkit}) # the build that held the lock may have
  if(NOT missing)
    return()
  endif()
  _leanopt_pinned_packages(packages ${missing})
  list(JOIN packages " " names)
  message(STATUS "leanopt: installing what the machine lacks of CUDA into ${home}: ${names}")
  set(aside ${home}.cuda.partial)
  _leanopt_pip_install(problem ${aside} ${packages})
  if(problem)
    set(${reason} "${problem}" PARENT_SCOPE)
    return()
  endif()
  # Last those that LibTorch names: where they are, the parts that they load are, too.
  file(GLOB libraries RELATIVE ${aside}/site ${aside}/site/nvidia/*/lib/*.so*)
  list(SORT libraries ORDER DESCENDING)
  foreach(library IN LISTS libraries)
    cmake_path(GET library PARENT_PATH folder)
    file(MAKE_DIRECTORY ${home}/${folder})
    file(RENAME ${aside}/site/${library} ${home}/${library})
  endforeach()
  file(REMOVE_RECURSE ${aside})
endfunction()

function(_leanopt_make_cuda_target version toolkit)
  if(CMAKE_CUDA_ARCHITECTURES)
    set(architectures ${CMAKE_CUDA_ARCHITECTURES})
  elseif(version VERSION_LESS 12.8)
    set(architectures 80-real 90)
  else()
    set(architectures 80-real 90-real 100-real 120)
  endif()
  set(options -O3 -std=c++17 --threads=0 -Xcompiler=-fPIC)
  foreach(architecture IN LISTS architectures)
    if(architecture MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      set(codes sm_${CMAKE_MATCH_1} compute_${CMAKE_MATCH_1})
      if(CMAKE_MATCH_2 STREQUAL -real)
        list(REMOVE_AT codes 1)
      elseif(CMAKE_MATCH_2 STREQUAL -virtual)
        list(REMOVE_AT codes 0)
      endif()
      list(JOIN codes , codes)
      list(APPEND options -gencode=arch=compute_${CMAKE_MATCH_1},code=[${codes}])
    else() # all, all-major, native
      list(APPEND options -arch=${architecture})
    endif()
  endforeach()
  if(CMAKE_CUDA_HOST_COMPILER)
    list(APPEND options -ccbin=${CMAKE_CUDA_HOST_COMPILER})
  endif()
  separate_arguments(flags UNIX_COMMAND "${CMAKE_CUDA_FLAGS}")
  list(APPEND options ${flags})

  # make does not notice that a command has changed, so the object is named after it.
  string(MD5 name "${LEANOPT_NVCC} ${options}")
  set(object ${CMAKE_CURRENT_BINARY_DIR}/leanopt_cuda.${name}.o)
  set(source ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/leanopt_cuda.cu)
  get_target_property(includes leanopt::leanopt INTERFACE_INCLUDE_DIRECTORIES)
  add_custom_command(OUTPUT ${object}
    COMMAND ${LEANOPT_NVCC} ${options} "-I$<JOIN:$<FILTER:${includes},INCLUDE,.>,;-I>"
            -c ${source} -o ${object} -MD -MF ${object}.d -MT ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMAND_EXPAND_LISTS VERBATIM
    COMMENT "Compiling leanopt's CUDA kernels")
  add_library(leanopt_cuda STATIC EXCLUDE_FROM_ALL
              ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/leanopt_cuda.cpp ${object})
  add_library(leanopt::cuda ALIAS leanopt_cuda)
  target_include_directories(leanopt_cuda SYSTEM PRIVATE ${toolkit}/include)
  target_compile_definitions(leanopt_cuda PUBLIC LEANOPT_WITH_CUDA)
  set_target_properties(leanopt_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON)

  # Nothing in a program names libtorch_cuda, which registers itself when it is loaded: the linker is
  # told to keep it. CMake is given the files once more, since it makes run paths of those it knows.
  list(JOIN ARGN "\" \"" kept)
  target_link_libraries(leanopt_cuda PUBLIC
    leanopt::leanopt "-Wl,--push-state,--no-as-needed \"${kept}\" -Wl,--pop-state" ${ARGN})
  list(JOIN architectures " " architectures)
  message(STATUS "leanopt: CUDA is on: nvcc ${version} for ${architectures}")
endfunction()
