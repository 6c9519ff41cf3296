// memory_plan, as its main runs it: figures of models that are widely known, files of all formats,
// and files that are damaged at every byte. Those may give a plan, if the damage is to a name, or
// the exit code 2 and one line that names the file; no damaged number may become an allocation.

#include "examples/plan/program.hpp"
#include "tests/examples/damage.hpp"
#include "tests/memory/counting.hpp"

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <caffe2/serialize/inline_container.h>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;
using namespace std::string_literals;

/// Above all that a plan for a small file takes, and below what a damaged length would.
constexpr std::int64_t most_memory = 2 << 20;

struct result {
  int code;
  std::string out, err;
};
result run(const std::vector<std::string>& words) {
  std::ostringstream out, err;
  const int code = plan::run(words, out, err);
  return {code, out.str(), err.str()};
}

using damage::read;
using damage::sample;

std::string repeated(int n, const std::string& text) {
  std::string result;
  for (int i = 0; i < n; ++i) result += text;
  return result;
}

/// A folder for the files of a test.
class MemoryPlan : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "memory_plan_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  std::string write(const std::string& name, const std::string& contents) const {
    fs::remove(path(name));  // to overwrite a file may wait for the disk
    std::ofstream(path(name), std::ios::binary) << contents;
    return path(name);
  }
  json plan(std::vector<std::string> words) const {
    words.push_back("--json=" + path("plan.json"));
    const result r = run(words);
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(r.err, "");
    return r.code ? json() : json::parse(read(path("plan.json")));
  }
  /// Exit code 2, no output, and a line that names the file and has `what`.
  void expect_refused(const std::string& file, const std::string& what = "") const {
    const result r = run({file});
    EXPECT_EQ(r.code, 2) << file << '\n' << r.out;
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(r.err.rfind("memory_plan: " + file + ": ", 0), 0u) << r.err;
    EXPECT_NE(r.err.find(what), std::string::npos) << r.err << "lacks: " << what;
    EXPECT_EQ(r.err.find('\n'), r.err.size() - 1) << r.err;
  }

  fs::path folder_;
};

const json& row(const json& plan, const std::string& optimizer, const std::string& weights) {
  for (const json& r : plan["rows"])
    if (r["optimizer"] == optimizer && r["weights"] == weights) return r;
  throw std::runtime_error("no row of " + optimizer + " with " + weights);
}

// ---- figures -----------------------------------------------------------------------------------

TEST_F(MemoryPlan, shows_what_the_recipes_are_known_for) {
  const result r = run({});
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(r.out.rfind("llama-7b: 291 tensors, 6,738,415,616 parameters\n", 0), 0u) << r.out;
  const auto expect_line = [&](const std::string& optimizer, const std::string& weights,
                               const std::string& figure) {
    std::istringstream lines(r.out);
    for (std::string line; std::getline(lines, line);)
      if (line.rfind(optimizer + "  ", 0) == 0 && line.find(' ' + weights + ' ') != line.npos) {
        EXPECT_NE(line.find(' ' + figure + ' '), line.npos) << line;
        return;
      }
    ADD_FAILURE() << optimizer << " is missing in\n" << r.out;
  };
  expect_line("basic_adafactor<log8, split24>", "bf16 + 8", "6.01");
  expect_line("basic_adamw<log8, split24>", "bf16 + 8", "7.02");
  expect_line("AdamW8bit", "bf16", "6.02");
  expect_line("AdamW8bit", "fp32", "10.02");
  expect_line("AdamW", "fp32", "16.00");
}

TEST_F(MemoryPlan, has_the_figures_of_distilbert) {
  const json p = plan({"distilbert"});
  EXPECT_EQ(p["tensors"], 104);
  EXPECT_EQ(p["parameters"], 65'783'042);
  // The README's 526,264,752 bytes, or 501.885 MB, count a step as the 4 bytes of Python's class.
  for (const char* name : {"torch-adamw", "adamw"})
    EXPECT_EQ(row(p, name, "fp32")["state"], 526'264'752 + 4 * 104);
  EXPECT_EQ(row(p, "adamw8bit", "fp32")["state"], 132'976'256);
  EXPECT_EQ(row(p, "adafactor-hf", "fp32")["state"], 715'264);
}

TEST_F(MemoryPlan, knows_the_sizes_of_its_models) {
  const auto expect_size = [&](const char* name, int tensors, std::int64_t parameters) {
    const json p = plan({name});
    EXPECT_EQ(p["tensors"], tensors) << name;
    EXPECT_EQ(p["parameters"], parameters) << name;
  };
  expect_size("gpt2", 148, 124'439'808);
  expect_size("llama-7b", 291, 6'738'415'616);
  expect_size("llama-70b", 723, 68'976'648'192);
}

TEST_F(MemoryPlan, adds_up) {
  const json p = plan({"llama-70b", "--fit=640"});
  EXPECT_EQ(p["rows"].size(), plan::contenders().size());
  for (const json& r : p["rows"]) {
    std::int64_t sum = 0;
    for (const json& bytes : r["bytes"]) sum += bytes.get<std::int64_t>();
    const auto total = r["total"].get<std::int64_t>();
    EXPECT_EQ(sum, total) << r;
    const auto n = p["parameters"].get<double>();
    EXPECT_DOUBLE_EQ(r["bytes_per_parameter"].get<double>(), double(total) / n);
    EXPECT_DOUBLE_EQ(r["models_that_fit"].get<double>(), 640 * 0x1p30 / double(total));
    EXPECT_EQ(r["parameters_that_fit"], std::int64_t(640 * 0x1p30 / double(total) * n));
  }
}

TEST_F(MemoryPlan, takes_gradients_of_another_type) {
  const std::int64_t n = plan({"gpt2"})["parameters"];
  const auto gradients = [&](const std::string& option, const std::string& weights) {
    const json p = plan({"gpt2", option});
    return row(p, "adamw8bit", weights)["bytes"]["gradients"].get<std::int64_t>();
  };
  EXPECT_EQ(gradients("--gradients=as-weights", "fp32"), 4 * n);
  EXPECT_EQ(gradients("--gradients=as-weights", "bf16"), 2 * n);
  EXPECT_EQ(gradients("--gradients=fp32", "bf16"), 4 * n);
  EXPECT_EQ(gradients("--gradients=bf16", "fp32"), 2 * n);
}

TEST_F(MemoryPlan, shows_the_optimizers_that_are_named) {
  const json p = plan({"gpt2", "--optimizer=adamw,torch-sgd", "--optimizer=adafactor"});
  ASSERT_EQ(p["rows"].size(), 3u);
  EXPECT_EQ(p["rows"][0]["optimizer"], "torch-sgd");
  EXPECT_EQ(p["rows"][1]["optimizer"], "adamw");
  EXPECT_EQ(p["rows"][2]["optimizer"], "adafactor");
}

TEST_F(MemoryPlan, refuses_wrong_arguments) {
  for (const char* wrong :
       {"--fit=0", "--fit=-1", "--fit=8x", "--fit=nan", "--fit=inf", "--fit=", "--fit",
        "--fit=1e10", "--gradients=fp8", "--optimizer=adam", "--skip=", "--svg", "--fast"}) {
    const result r = run({"gpt2", wrong});
    EXPECT_EQ(r.code, 2) << wrong;
    EXPECT_EQ(r.out, "") << wrong;
    EXPECT_NE(r.err.find("usage: memory_plan"), r.err.npos) << wrong;
  }
  const result twice = run({"gpt2", "--fit=8", "--fit=9"});
  EXPECT_EQ(twice.code, 2);
  EXPECT_NE(twice.err.find("--fit is there twice"), twice.err.npos) << twice.err;
  const std::string list = write("list", "weight 3\n");
  for (const std::vector<std::string>& words :
       {std::vector{list, "--json=" + list}, {"gpt2", "--svg=plan", "--json=plan"}}) {
    const result r = run(words);
    EXPECT_EQ(r.code, 2);
    EXPECT_NE(r.err.find("would be overwritten"), r.err.npos) << r.err;
  }
  EXPECT_EQ(read(list), "weight 3\n");
  const result help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.out.rfind("usage: memory_plan", 0), 0u);
}

TEST_F(MemoryPlan, says_which_output_it_cannot_write) {
  for (const char* option : {"--svg=", "--json="}) {
    const result r = run({"gpt2", option + path("none/file")});
    EXPECT_EQ(r.code, 1);
    EXPECT_NE(r.err.find(path("none/file")), r.err.npos) << r.err;
  }
  std::ofstream full("/dev/full");
  std::ostringstream err;
  EXPECT_EQ(plan::run({"gpt2"}, full, err), 1);
  EXPECT_NE(err.str().find("cannot be written"), std::string::npos) << err.str();
}

// ---- the chart ---------------------------------------------------------------------------------

/// Whether tags nest, attributes are quoted, and text has no character that XML reserves.
bool is_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (std::size_t i = 0; i < xml.size();) {
    if (xml[i] != '<') {
      if (xml[i] == '>' || static_cast<unsigned char>(xml[i]) < '\n') return false;
      if (xml[i] == '&' && xml.compare(i, 4, "&lt;") && xml.compare(i, 4, "&gt;") &&
          xml.compare(i, 5, "&amp;") && xml.compare(i, 6, "&quot;"))
        return false;
      ++i;
      continue;
    }
    bool quoted = false;
    std::size_t end = i + 1;
    for (; end < xml.size() && (quoted || xml[end] != '>'); ++end) {
      if (xml[end] == '"') quoted = !quoted;
      if (xml[end] == '<') return false;
    }
    if (end == xml.size()) return false;
    const std::string tag = xml.substr(i + 1, end - i - 1), name = tag.substr(0, tag.find(' '));
    if (name.front() == '/') {
      if (open.empty() || name != '/' + open.back()) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    i = end + 1;
  }
  return open.empty();
}
std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = 0; (at = text.find(part, at)) != text.npos; ++at) ++n;
  return n;
}

TEST_F(MemoryPlan, draws_three_bars_a_row) {
  const std::size_t rows = plan::contenders().size();
  ASSERT_EQ(run({"llama-7b", "--svg=" + path("plan.svg")}).code, 0);
  const std::string svg = read(path("plan.svg"));
  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_EQ(count(svg, "<rect"), 1 + 3 + 3 * rows);  // the ground, the legend
  EXPECT_EQ(count(svg, "basic_adafactor&lt;log8, split24&gt;"), 1u);
  EXPECT_EQ(count(svg, ">80 GiB<"), 1u);
}

TEST_F(MemoryPlan, draws_whatever_the_file_is_called) {
  const std::string list = write("a<b>&\"\x01\xff\xc3.txt", "weight 3 4\n");
  ASSERT_EQ(run({list, "--svg=" + path("plan.svg"), "--json=" + path("plan.json")}).code, 0);
  const std::string svg = read(path("plan.svg"));
  EXPECT_TRUE(is_well_formed(svg));
  EXPECT_EQ(count(svg, "a&lt;b&gt;&amp;&quot;???.txt"),
            2u);  // the title, for readers of screens too
  EXPECT_EQ(json::parse(read(path("plan.json")))["parameters"], 12);

  const std::string name = "модель 重み.txt";
  const json p = plan({write(name, "weight 3 4\n"), "--svg=" + path("plan.svg")});
  EXPECT_EQ(p["model"], name);
  EXPECT_EQ(count(read(path("plan.svg")), name), 2u);
}

// ---- lists -------------------------------------------------------------------------------------

TEST_F(MemoryPlan, reads_lists_with_and_without_types) {
  const json p = plan({write("list",
                             "# a comment\n\n\r\n \t\n  # another\n"
                             "weight bf16 3 4\nbias F32 5\r\nplain 7\n"
                             "scale float32\nsteps int64 9\nnorm.running_mean 8\nlast fp16 0 4")});
  EXPECT_EQ(p["tensors"], 5);
  EXPECT_EQ(p["parameters"], 3 * 4 + 5 + 7 + 1);
  EXPECT_EQ(p["left_out"], 2);
}

TEST_F(MemoryPlan, leaves_out_what_it_is_told_to) {
  const std::string list = write("list", "a.weight 3\na.mask 5\nb.mask 5\nmask.b 7\n");
  EXPECT_EQ(plan({list, "--skip=.mask"})["parameters"], 10);
  EXPECT_EQ(plan({list, "--skip=a.mask", "--skip=.b"})["parameters"], 8);
  expect_refused(list + "x", "no such file");
}

TEST_F(MemoryPlan, adds_shards) {
  const std::string a = write("a", "one 3\n"), b = write("b", "two 5\n");
  const json p = plan({a, b});
  EXPECT_EQ(p["parameters"], 8);
  EXPECT_EQ(p["model"], "a and 1 more");
  const result r = run({a, b, a});
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("'one' is there twice"), r.err.npos) << r.err;
}

TEST_F(MemoryPlan, refuses_lists_that_are_none) {
  const auto refuse = [&](const std::string& text, const std::string& what) {
    expect_refused(write("list", text), what);
  };
  refuse("", "is empty");
  refuse("# nothing\n", "no parameters");
  refuse("weight 0 5\n", "no parameters");
  refuse("steps int64 5\n", "no parameters");
  refuse("ok 3\nweight\n", "line 2: expected a name");
  refuse("weight 3 -4\n", "line 1: 'weight' has the negative size -4");
  refuse("weight 3 4.5\n", "'4.5' is neither a size");
  refuse("weight 3 bf16\n", "'bf16' is neither a size");
  refuse("weight fp12 3\n", "'fp12' is neither a size");
  refuse("weight 9223372036854775807 9223372036854775807\n", "more than 10^15 elements");
  refuse("weight 9223372036854775807 9223372036854775807 0\n", "more than 10^15 elements");
  refuse("weight 9223372036854775808\n", "is neither a size");
  refuse("a 900000000000000\nb 900000000000000\n", "more than 10^15 elements in all");
  refuse("weight 3\nweight 3\n", "line 2: 'weight' is there twice");
  refuse("weight complex64 3\n", "complex");
  refuse("weight" + repeated(65, " 1") + "\n", "65 dimensions");
  refuse(std::string("weight\0 3\n", 10), "neither safetensors, nor");
  refuse(
      "\x7f"
      "ELF\x02\x01\x01",
      "neither safetensors, nor");
}

TEST_F(MemoryPlan, refuses_what_is_no_file) {
  expect_refused(path("none"), "no such file");
  expect_refused(folder_, "is a folder");
  const std::string fifo = path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  expect_refused(fifo, "no regular file");
  expect_refused(write("model.safetensors.index.json", "{\"weight_map\": {}}"), "shards");
}

// ---- safetensors -------------------------------------------------------------------------------

std::string with_header(const std::string& header, std::size_t values) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += char(header.size() >> (8 * i) & 0xff);
  return file + header + std::string(values, '\0');
}

TEST_F(MemoryPlan, reads_safetensors) {
  const json p = plan({sample("reference.safetensors")});
  EXPECT_EQ(p["tensors"], 5);
  EXPECT_EQ(p["parameters"], 8 * 5 + 8 + 3 + 1);
  EXPECT_EQ(p["left_out"], 1);
  // By their contents, whatever they are called.
  const std::string same = write("renamed.bin", read(sample("reference.safetensors")));
  EXPECT_EQ(plan({same})["parameters"], p["parameters"]);
}

TEST_F(MemoryPlan, reads_the_small_types_of_safetensors) {
  const json p =
      plan({write("small.safetensors",
                  with_header(R"({"a":{"dtype":"F4","shape":[6],"data_offsets":[0,3]},)"
                              R"("b":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[3,6]},)"
                              R"("c":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[6,11]}})",
                              11))});
  EXPECT_EQ(p["parameters"], 15);
}

TEST_F(MemoryPlan, refuses_safetensors_that_are_none) {
  const auto refuse = [&](const std::string& header, std::size_t values, const std::string& what) {
    expect_refused(write("model.safetensors", with_header(header, values)), what);
  };
  const auto one = [](const std::string& fields) { return "{\"w\":{" + fields + "}}"; };
  const auto shaped = [&](const std::string& shape, const std::string& offsets) {
    return one("\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
  };
  refuse("", 0, "not JSON");
  refuse("{", 0, "not JSON");
  refuse("hello", 0, "not JSON");
  refuse("[]", 0, "no JSON object");
  refuse("[5]", 0, "no JSON object");
  refuse("5", 0, "no JSON object");
  refuse(std::string("{}\0{", 4), 0, "a byte of zero");
  refuse("{}", 0, "no parameters");
  refuse("{}", 4, "4 bytes behind");
  refuse("{\"w\":5}", 0, "'w' has no dtype");
  refuse(one("\"shape\":[1],\"data_offsets\":[0,4]"), 4, "'w' has no dtype");
  refuse(one("\"dtype\":\"F32\",\"data_offsets\":[0,4]"), 4, "'w' has no shape");
  refuse(one("\"dtype\":\"F32\",\"shape\":[1]"), 4, "'w' has no data_offsets");
  refuse(one("\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]"), 4, "no text");
  refuse(one("\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, "unknown dtype 'F31'");
  refuse(one("\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,1]"), 1, "'w' has 1 bytes");
  refuse(shaped("7", "[0,4]"), 4, "no list");
  refuse(shaped("[1.0]", "[0,4]"), 4, "no whole number");
  refuse(shaped("[\"1\"]", "[0,4]"), 4, "no whole number");
  refuse(shaped("[-1]", "[0,4]"), 4, "negative size");
  refuse(shaped("[18446744073709551615]", "[0,4]"), 4, "beyond 2^63");
  refuse(shaped("[99999999999999999999999]", "[0,4]"), 4, "no whole number");
  refuse(shaped("[4294967296,4294967296]", "[0,0]"), 0, "10^15");
  refuse(shaped("[0,9223372036854775807,9223372036854775807]", "[0,0]"), 0, "10^15");
  refuse(shaped("[1]", "[0]"), 4, "two numbers");
  refuse(shaped("[1]", "[-4,0]"), 4, "ends before");
  refuse(shaped("[1]", "[4,0]"), 4, "ends before");
  refuse(shaped("[2]", "[0,4]"), 4, "'w' has 4 bytes");
  refuse(shaped("[1]", "[0,18446744073709551615]"), 4, "beyond 2^63");
  refuse(shaped("[1]", "[4,8]"), 8, "gap before 'w'");
  refuse(shaped("[2]", "[0,8]"), 4, "truncated");
  refuse(shaped("[1]", "[0,4]"), 5, "1 bytes behind");
  refuse(shaped("[[1]]", "[0,4]"), 4, "no header has");
  refuse(one("\"dtype\":{}"), 4, "no header has");
  refuse(shaped("[1" + repeated(1000, ",1") + "]", "[0,4]"), 4, "no header has");
  refuse(shaped("[1],\"shape\":[2]", "[0,8]"), 8, "'shape' is there twice");
  refuse(
      "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
      "\"v\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
      6, "overlaps");
  refuse(
      "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
      "\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
      8, "'w' is there twice");
  refuse(one("\"dtype\":\"C64\",\"shape\":[1],\"data_offsets\":[0,8]"), 8, "complex");
}

TEST_F(MemoryPlan, believes_no_length_of_a_header) {
  const std::string good = read(sample("reference.safetensors"));
  for (int bit = 0; bit < 64; ++bit) {
    std::string bad = good;
    bad[std::size_t(bit / 8)] = char(bad[std::size_t(bit / 8)] ^ 1 << bit % 8);
    expect_refused(write("model.safetensors", bad));
  }
  expect_refused(write("model.safetensors", std::string("\0\0\0\0\0\0\0\x10{", 9)),
                 "1152921504606846976 bytes");  // 2^60
  expect_refused(write("model.safetensors", std::string("\xff\xe0\xf5\5\0\0\0\0{", 9)),
                 "ends before the end of the header");  // 99,999,999
}

// ---- torch.save and torch::save ----------------------------------------------------------------

TEST_F(MemoryPlan, reads_state_dicts_and_modules_of_python) {
  for (const char* name : {"state_dict.pt", "checkpoint.pt", "module.pt"}) {
    const json p = plan({sample(name)});
    EXPECT_EQ(p["tensors"], 5) << name;
    EXPECT_EQ(p["parameters"], 40 * 8 + 8 + 8 + 8 * 8 + 8) << name;
    EXPECT_EQ(p["tied"], 1) << name;
  }
  EXPECT_EQ(plan({sample("types.pt")})["parameters"], 12 + 12);
}

TEST_F(MemoryPlan, reads_modules_of_libtorch) {
  torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4),
                            torch::nn::Linear(4, 2));
  net[0]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
  torch::save(net, path("module.pt"));
  const json p = plan({path("module.pt")});
  EXPECT_EQ(p["tensors"], 5);
  EXPECT_EQ(p["parameters"], 6 * 4 + 4 + 4 + 4 * 2 + 2);
  EXPECT_EQ(p["left_out"], 4);  // the frozen bias, and the buffers

  torch::save(torch::ones({3}), path("tensor.pt"));
  expect_refused(path("tensor.pt"), "no parameters");
}

TEST_F(MemoryPlan, says_what_it_cannot_read) {
  expect_refused(sample("legacy.pt"), "before 1.6");
  expect_refused(sample("sparse.pt"), "'sparse' is a torch._utils._rebuild_sparse_tensor");
  expect_refused(write("none.pt", "weight 3\n"), "no whole zip archive");
  // An empty archive.
  expect_refused(write("none.pt", "PK\x05\x06" + std::string(18, '\0')), "no data.pkl");
}

TEST_F(MemoryPlan, refuses_tensors_that_their_storage_does_not_hold) {
  const std::string good = read(sample("state_dict.pt"));
  const auto replaced = [&](const std::string& from, const std::string& to, bool last) {
    std::string bad = good;
    const std::size_t at = last ? bad.rfind(from) : bad.find(from);
    EXPECT_NE(at, bad.npos);
    return write("bad.pt", bad.replace(at, from.size(), to));
  };
  // Sizes (40, 8) to (41, 8); the stride 8 to 9; the name of a record in the archive's list.
  expect_refused(replaced("K(K\x08\x86", "K)K\x08\x86", false), "beyond its storage");
  expect_refused(replaced("K\x08K\x01\x86", "K\x09K\x01\x86", false), "beyond its storage");
  expect_refused(replaced("/data/1", "/data/x", true), "'norm.weight' has no record");

  // The archive's list says that the first record, stored as it is, has 2^24 bytes more.
  std::string bad = good;
  const std::size_t entry = bad.find("PK\x01\x02");
  bad[entry + 27] = 1;  // than were stored
  expect_refused(write("bad.pt", bad), "no whole zip archive");
  bad[entry + 23] = 1;  // than the file holds
  expect_refused(write("bad.pt", bad), "no whole zip archive");
}

TEST_F(MemoryPlan, survives_pickles_that_were_made_to_harm) {
  const auto refuse = [&](const std::string& operations, const std::string& what) {
    const std::string file = path("bad.pt");
    fs::remove(file);
    caffe2::serialize::PyTorchStreamWriter writer(file);
    const std::string pickle = "\x80\x02" + operations;
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeEndOfFile();
    counting::host.start();
    expect_refused(file, what);
    // An operation of one byte makes one value at most; the rest is its place on the stack.
    const auto per_byte = std::int64_t(sizeof(plan::pickle::value) + 32);
    EXPECT_LT(counting::host.peak(), most_memory + per_byte * std::int64_t(pickle.size())) << what;
  };
  const std::string object = "cmodule\nNet\n)\x81";  // without a state
  refuse("", "ends too early");
  refuse(".", "empty stack");
  refuse("t.", "lost a mark");
  refuse("(0t.", "empty stack");
  refuse("N(1\x85", "ends too early");
  refuse("h\x07.", "refers to a value that it lacks");
  refuse("X\xff\xff\xff\xffname.", "ends too early");
  refuse("\x8b\xff\xff\xff\xff.", "ends too early");
  refuse("cmodule.", "ends too early");
  refuse("N.", "neither a state dict nor a module");
  refuse(object + ".", "holds a module.Net");
  refuse("N)R.", "holds a nameless object");
  refuse("]q\0h\0a."s, "neither a state dict nor a module");     // a list that holds itself
  refuse("}q\0X\4\0\0\0selfh\0s."s, "the keys 'self'");          // a dict
  refuse(object + "q\0}X\4\0\0\0selfh\0sb."s, "no parameters");  // a module
  refuse(repeated(5000, object + "}X\1\0\0\0m"s) + object + repeated(5000, "sb") + ".",
         "nested too deeply");
  refuse("X\1\0\0\0a"s + repeated(60, "2\x93") + ".", "a long name");  // doubles each time
  refuse("c" + repeated(100, "module") + "\nNet\n.", "a long name");
  refuse(repeated(4'000'001, "N") + ".", "more than 4,000,000 values");
}

// ---- damage ------------------------------------------------------------------------------------

class Damage : public MemoryPlan, public testing::WithParamInterface<const char*> {
 protected:
  const std::string good_ = damage::read(damage::sample(GetParam()));

  result run_with(const std::string& contents) const {
    const std::string file = write(GetParam(), contents);
    counting::host.start();
    result r = run({file, "--optimizer=adamw"});
    EXPECT_LT(counting::host.peak(), most_memory) << r.err;
    return r;
  }
};
INSTANTIATE_TEST_SUITE_P(File, Damage, damage::samples(), damage::test_name);

TEST_P(Damage, by_an_early_end_is_refused) {
  damage::each_early_end(good_, [&](const std::string& bad) {
    const result r = run_with(bad);
    ASSERT_EQ(r.code, 2) << r.out;
    ASSERT_EQ(r.err.rfind("memory_plan: " + path(GetParam()) + ": ", 0), 0u) << r.err;
  });
}

TEST_P(Damage, to_any_byte_is_no_worse_than_an_error) {
  damage::each_wrong_byte(good_, [&](const std::string& bad) {
    const result r = run_with(bad);
    ASSERT_TRUE(r.code == 0 || r.code == 2) << r.code << ' ' << r.err;
    ASSERT_EQ(r.code == 0, r.err.empty()) << r.err;
  });
}

}  // namespace
