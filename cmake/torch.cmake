# Provides the target leanopt::torch: LibTorch's headers, its CPU libraries, its language standard.
# The first of these is taken: a target `torch` that the including project has; what CMake was told
# (Torch_DIR, Torch_ROOT, CMAKE_PREFIX_PATH, as variables or in the environment); the torch of the
# active python3; and, with LEANOPT_FETCH_TORCH, a pinned wheel in a cache folder. The build of
# leanopt and the installed package both use this file. Torch's own config is only read, never
# evaluated: it demands a whole CUDA toolkit even for CPU programs and edits the caller's flags.

set(leanopt_oldest_torch 2.6)
set(leanopt_pinned_torch 2.15.0)

# Sets `problem` to a sentence for the user where no LibTorch is to be had, else to nothing. The
# target's properties LEANOPT_TORCH_DIR and LEANOPT_TORCH_VERSION say what was found.
function(leanopt_provide_torch problem)
  set(${problem} "" PARENT_SCOPE)
  if(TARGET leanopt::torch)
    return()
  endif()
  if(TARGET torch)
    _leanopt_wrap_torch_target()
    return()
  endif()
  if(NOT CMAKE_SYSTEM_NAME STREQUAL Linux)
    set(${problem} "leanopt finds LibTorch by itself on Linux only; call find_package(Torch) first."
        PARENT_SCOPE)
    return()
  endif()

  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  _leanopt_find_config(dir ${Torch_DIR} ${Torch_ROOT} ${CMAKE_PREFIX_PATH} $ENV{Torch_DIR}
                       $ENV{Torch_ROOT} ${prefixes})
  if(NOT dir)
    _leanopt_find_python_torch(dir)
  endif()
  if(NOT dir AND LEANOPT_FETCH_TORCH)
    _leanopt_fetch_torch(dir reason)
  elseif(NOT dir)
    set(reason "Set CMAKE_PREFIX_PATH to the folder of a LibTorch ${leanopt_oldest_torch} or later, \
activate a python3 that has torch, or set LEANOPT_FETCH_TORCH=ON to install a pinned one.")
  endif()
  if(NOT dir)
    set(${problem} "leanopt found no LibTorch. ${reason}" PARENT_SCOPE)
    return()
  endif()
  _leanopt_make_torch_target(${dir})
endfunction()

# The folder of the first usable TorchConfig.cmake below one of the roots given.
function(_leanopt_find_config result)
  set(${result} "" PARENT_SCOPE)
  foreach(root IN LISTS ARGN)
    set(dir dir-NOTFOUND)
    find_path(dir TorchConfig.cmake PATHS ${root} NO_CACHE NO_DEFAULT_PATH
              PATH_SUFFIXES share/cmake/Torch torch/share/cmake/Torch Torch)
    if(NOT dir)
      continue()
    endif()
    get_filename_component(dir ${dir} ABSOLUTE)
    get_filename_component(home ${dir}/../../.. ABSOLUTE)
    _leanopt_read_version(version ${dir})
    if(version VERSION_LESS leanopt_oldest_torch)
      message(STATUS "leanopt: LibTorch ${version} in ${home} is older than "
                     "${leanopt_oldest_torch}: passed over")
    elseif(NOT EXISTS ${home}/lib/libtorch_cpu.so)
      message(STATUS "leanopt: the LibTorch of ${dir} has another layout than the wheel and the "
                     "zip: passed over (to use it, call find_package(Torch) first)")
    else()
      set(${result} ${dir} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(_leanopt_read_version result dir)
  file(STRINGS ${dir}/TorchConfigVersion.cmake line REGEX "set\\(PACKAGE_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${line}")
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# The active python3 is the one that the user's shell would run; find_package(Python3) may well
# prefer another.
function(_leanopt_python result)
  if(Python3_EXECUTABLE)
    set(${result} ${Python3_EXECUTABLE} PARENT_SCOPE)
  else()
    set(${result} python3 PARENT_SCOPE)
  endif()
endfunction()

function(_leanopt_find_python_torch result)
  _leanopt_python(python)
  set(ask "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  execute_process(COMMAND ${python} -c "${ask}" OUTPUT_VARIABLE root RESULT_VARIABLE failed
                  ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    set(root "")
  endif()
  _leanopt_find_config(dir ${root})
  set(${result} "${dir}" PARENT_SCOPE)
endfunction()

function(_leanopt_fetch_dir result)
  if(LEANOPT_FETCH_DIR)
    set(dir ${LEANOPT_FETCH_DIR})
  elseif(NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
    set(dir $ENV{XDG_CACHE_HOME}/leanopt)
  elseif(NOT "$ENV{HOME}" STREQUAL "")
    set(dir $ENV{HOME}/.cache/leanopt)
  else()
    set(dir ${CMAKE_BINARY_DIR}/leanopt-cache)
  endif()
  cmake_path(ABSOLUTE_PATH dir BASE_DIRECTORY ${CMAKE_BINARY_DIR} NORMALIZE)
  set(${result} ${dir} PARENT_SCOPE)
endfunction()

# The packages of NVIDIA's that have the libraries named and what these need, as the pinned torch asks
# for them.
function(_leanopt_pinned_packages result)
  set(libnvJitLink nvidia-nvjitlink==13.2.86)
  set(libcublas nvidia-cublas==13.4.1.3)
  set(libcublasLt ${libcublas})
  set(libcudart nvidia-cuda-runtime==13.2.86)
  set(libcudnn nvidia-cudnn-cu13==9.26.0.51)
  set(libcufft nvidia-cufft==12.2.0.57 ${libnvJitLink})
  set(libcufile nvidia-cufile==1.17.1.22)
  set(libcupti nvidia-cuda-cupti==13.2.86)
  set(libcusolver nvidia-cusolver==12.2.0.11 ${libnvJitLink})
  set(libcusparse nvidia-cusparse==12.7.10.12 ${libnvJitLink})
  set(libcusparseLt nvidia-cusparselt-cu13==0.8.1)
  set(libnccl nvidia-nccl-cu13==2.30.7)
  set(libnvrtc nvidia-cuda-nvrtc==13.2.86)
  set(libnvshmem_host nvidia-nvshmem-cu13==3.7.2)
  set(packages "")
  foreach(library IN LISTS ARGN)
    list(APPEND packages ${${library}})
  endforeach()
  list(REMOVE_DUPLICATES packages)
  set(${result} ${packages} PARENT_SCOPE)
endfunction()

# Sets `home` to the folder of the pinned LibTorch, of which `cache` keeps one subfolder per pin.
function(_leanopt_fetched_home home cache)
  _leanopt_fetch_dir(dir)
  set(${cache} ${dir} PARENT_SCOPE)
  set(${home} ${dir}/torch-${leanopt_pinned_torch} PARENT_SCOPE)
endfunction()

# One build at a time fills the cache: held until the function that calls this returns.
macro(_leanopt_lock cache)
  file(MAKE_DIRECTORY ${cache})
  file(LOCK ${cache}/lock GUARD FUNCTION TIMEOUT 0 RESULT_VARIABLE busy)
  if(busy)
    message(STATUS "leanopt: waiting for another build that fills ${cache}")
    file(LOCK ${cache}/lock GUARD FUNCTION TIMEOUT 3600)
  endif()
endmacro()

# Installs the wheels named into ${aside}/site, to be moved from there when all is whole; sets
# `reason` where it cannot. pip unpacks in TMPDIR, which may be too small for 1.2 GB, and a user's
# settings may forbid --target. Naming the wheels' Python and platforms gives every machine the same
# files, whatever its python3.
function(_leanopt_pip_install reason aside)
  set(${reason} "" PARENT_SCOPE)
  _leanopt_python(python)
  execute_process(COMMAND ${python} -m pip --version OUTPUT_QUIET ERROR_QUIET
                  RESULT_VARIABLE failed)
  if(failed)
    set(${reason} "Installing ${ARGN} takes python3 with pip (Debian: apt-get install python3-pip), \
and '${python} -m pip' does not run." PARENT_SCOPE)
    return()
  endif()
  set(platforms --platform manylinux2014_x86_64)
  foreach(glibc RANGE 17 28)
    list(APPEND platforms --platform manylinux_2_${glibc}_x86_64)
  endforeach()
  file(REMOVE_RECURSE ${aside})
  file(MAKE_DIRECTORY ${aside}/tmp)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore
            PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR=${aside}/tmp
            ${python} -m pip install --no-deps --no-compile --no-cache-dir --target ${aside}/site
            --only-binary :all: --python-version 3.11 --implementation cp ${platforms} ${ARGN}
    RESULT_VARIABLE failed)
  if(failed)
    file(REMOVE_RECURSE ${aside})
    set(${reason} "pip could not install ${ARGN}: its message stands above." PARENT_SCOPE)
  endif()
endfunction()

# torch's full dependencies weigh 5.4 GB, nearly all of it for GPUs. The CPU libraries load two of
# them, so pip is given these by name and told to resolve nothing.
function(_leanopt_fetch_torch result reason)
  set(${result} "" PARENT_SCOPE)
  set(${reason} "" PARENT_SCOPE)
  if(NOT CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL x86_64)
    set(${reason} "The pinned wheel is for x86-64: set CMAKE_PREFIX_PATH to a LibTorch of your own."
        PARENT_SCOPE)
    return()
  endif()

  _leanopt_fetched_home(home cache)
  if(NOT EXISTS ${home})
    _leanopt_lock(${cache})
  endif()
  if(NOT EXISTS ${home}) # still: the build that held the lock may have filled it
    message(STATUS "leanopt: no LibTorch found; installing torch==${leanopt_pinned_torch}, the CPU "
                   "half, into ${home}: 0.5 GB to load, 1.2 GB on disk, once for all builds")
    set(aside ${home}.partial)
    _leanopt_pinned_packages(packages libcudart libcupti)
    _leanopt_pip_install(problem ${aside} torch==${leanopt_pinned_torch} ${packages})
    if(problem)
      set(${reason} "${problem} Or set CMAKE_PREFIX_PATH to the folder of a LibTorch." PARENT_SCOPE)
      return()
    endif()
    file(RENAME ${aside}/site ${home})
    file(REMOVE_RECURSE ${aside})
  endif()
  set(${result} ${home}/torch/share/cmake/Torch PARENT_SCOPE)
endfunction()

# LibTorch's headers need C++20 from 2.12 on; older ones are tried with C++17.
function(_leanopt_set_torch_facts dir)
  _leanopt_read_version(version ${dir})
  set_target_properties(leanopt::torch PROPERTIES LEANOPT_TORCH_DIR ${dir}
                                                  LEANOPT_TORCH_VERSION ${version})
  if(version VERSION_LESS 2.12)
    target_compile_features(leanopt::torch INTERFACE cxx_std_17)
  else()
    target_compile_features(leanopt::torch INTERFACE cxx_std_20)
  endif()
  # The wheels before 2.7 have libstdc++'s old ABI, and say so only in a variable of flags.
  file(STRINGS ${dir}/TorchConfig.cmake line REGEX "_GLIBCXX_USE_CXX11_ABI=")
  if(line MATCHES "_GLIBCXX_USE_CXX11_ABI=[01]")
    target_compile_definitions(leanopt::torch INTERFACE ${CMAKE_MATCH_0})
  endif()
  # ld looks for the libraries that LibTorch's own ones need: it must take those beside them, not
  # another CUDA's from some -rpath or ld.so.conf. At run time LibTorch's RPATH finds them.
  if(CMAKE_SYSTEM_NAME STREQUAL Linux)
    get_filename_component(home ${dir}/../../.. ABSOLUTE)
    get_filename_component(site ${home}/.. ABSOLUTE)
    file(GLOB beside LIST_DIRECTORIES true ${home}/lib ${site}/nvidia/*/lib)
    list(TRANSFORM beside PREPEND "LINKER:-rpath-link,")
    target_link_options(leanopt::torch INTERFACE ${beside})
  endif()
  message(STATUS "leanopt: LibTorch ${version} of ${dir}")
endfunction()

function(_leanopt_make_torch_target dir)
  get_filename_component(home ${dir}/../../.. ABSOLUTE)
  add_library(leanopt::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(leanopt::torch INTERFACE
                             ${home}/include ${home}/include/torch/csrc/api/include)
  target_link_libraries(leanopt::torch INTERFACE ${home}/lib/libtorch_cpu.so ${home}/lib/libc10.so)
  _leanopt_set_torch_facts(${dir})
endfunction()

function(_leanopt_wrap_torch_target)
  add_library(leanopt::torch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(leanopt::torch INTERFACE torch)
  if(EXISTS "${Torch_DIR}/TorchConfig.cmake")
    _leanopt_set_torch_facts(${Torch_DIR})
  else()
    target_compile_features(leanopt::torch INTERFACE cxx_std_17)
  endif()
endfunction()
