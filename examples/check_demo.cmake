# Runs the demo as a user would, with right and with wrong arguments:
#   cmake -D DEMO=path/to/demo -P check_demo.cmake

function(run_demo)
  execute_process(COMMAND ${DEMO} ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE out
                  ERROR_VARIABLE err)
  set(code "${code}" PARENT_SCOPE)
  set(out "${out}" PARENT_SCOPE)
  set(err "${err}" PARENT_SCOPE)
endfunction()

function(expect_output pattern)
  if(NOT code STREQUAL "0" OR NOT out MATCHES "${pattern}")
    message(FATAL_ERROR "exit code ${code}, no match for '${pattern}' in\n${out}\n${err}")
  endif()
endfunction()

function(expect_usage)
  run_demo(${ARGN})
  if(NOT code STREQUAL "2" OR NOT err MATCHES "usage: demo" OR out)
    message(FATAL_ERROR "'${ARGN}' was not refused: exit code ${code}\n${out}\n${err}")
  endif()
endfunction()

expect_usage(--model resnet)
expect_usage(--optimizer sgd)
expect_usage(--epochs 0)
expect_usage(--epochs 2x)
expect_usage(--epochs 256)
expect_usage(--seed -1)
expect_usage(--device all)
expect_usage(--threads 0)
expect_usage(--threads)
expect_usage(--fast)

run_demo(--data /nonexistent --no-sizes)
if(NOT code STREQUAL "1" OR NOT err MATCHES "cannot open")
  message(FATAL_ERROR "a missing data folder gave exit code ${code}\n${err}")
endif()

run_demo(--device cuda)
if(NOT code STREQUAL "1" OR out OR
   NOT err STREQUAL "demo: --device cuda: this program was built without leanopt::cuda; the target \
run_demo_cuda builds and runs one with it\n")
  message(FATAL_ERROR "--device cuda gave exit code ${code}\n${out}\n${err}")
endif()

run_demo(--help)
expect_output("^usage: demo")

run_demo(--model mlp --epochs 1 --threads 1 --no-sizes)
foreach(optimizer torch::optim::AdamW leanopt::AdamW leanopt::Adafactor leanopt::AdamW8bit)
  expect_output("mlp with ${optimizer}: 19,210 parameters")
  expect_output("\nmlp +${optimizer} +0\\.[0-9]+ +0\\.[0-9]+ ")
endforeach()
expect_output("epoch 1/1 .* 23/23 .*eval_loss [0-9.]+  eval_accuracy [0-9.]+  eval_f1 [0-9.]+\n")
