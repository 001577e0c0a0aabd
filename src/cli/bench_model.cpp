// Times a model: training steps (optimiser and data included) in float32 and bf16 with their peak memory, and decoding
// of a long text, whose time and memory per token must not grow.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/folders.h"
#include "base/memory.h"
#include "base/process_time.h"
#include "base/stop.h"
#include "base/threads.h"
#include "cli/bench_report.h"
#include "cli/run_config.h"
#include "cli/say.h"
#include "generate/session.h"
#include "ops/device_ranks.h"
#include "ops/product_record.h"
#include "report/progress.h"
#include "report/table.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"
#include "train/step.h"
#include "train/token_writer.h"
#include "train/trainer.h"

namespace fw::cli {
namespace {

using PlainJson = nlohmann::json;

// Text whose statistics do not matter for time: words of random letters.
std::string random_text(size_t bytes) {
  Random random(7);
  std::string text;
  while (text.size() < bytes) {
    const uint64_t letters = 1 + random.below(9);
    for (uint64_t i = 0; i < letters; ++i) text += static_cast<char>('a' + random.below(26));
    text += random.below(10) == 0 ? '\n' : ' ';
  }
  return text;
}

struct TrainResult {
  Samples ms;
  int64_t peak = 0;
};

constexpr int64_t kWarmSteps = 5;  // untimed: memory is touched and kernels are compiled in the first steps

TrainConfig config_of(const ModelBench& bench) {
  TrainConfig config;
  config.steps = kWarmSteps + bench.steps;
  config.batch = bench.batch;
  config.length = bench.length;
  config.accumulate = bench.accumulate;
  config.warmup = 10;
  config.log_every = 1;
  config.recompute = bench.recompute;
  config.memory = bench.memory;
  config.moments = bench.moments;
  config.device = bench.device;
  config.checkpoint_every = 0;
  return config;
}

void train_once(const ModelBench& bench, const std::string& precision,
                const std::shared_ptr<const Tokenizer>& tokenizer, const std::shared_ptr<const TokenFile>& tokens,
                TrainResult& result) {
  const TemporaryFolder folder;
  TrainConfig config = config_of(bench);
  config.out = folder.path() + "/run";
  config.precision = precision;
  reset_peak();
  Trainer trainer(config, bench.model, tokenizer, tokens, nullptr);
  trainer.run(
      [&](const LogRecord& record) {
        if (record.step > kWarmSteps) result.ms.add(record.ms);
        result.peak = std::max(result.peak, peak_bytes());
      },
      &stop_flag());
  stop_point("bench", trainer.step(), config.steps, "training steps");
}

Batch random_batch(const ModelBench& bench, Random& random) {
  Batch batch;
  batch.layout = SeqLayout::uniform(bench.batch, bench.length);
  batch.ids.resize(static_cast<size_t>(batch.layout.tokens()));
  for (int32_t& id : batch.ids) id = static_cast<int32_t>(random.below(static_cast<uint64_t>(bench.model.vocab_size)));
  batch.targets = batch.ids;
  return batch;
}

// "8x2048", or "2 of 4x2048" of two batches.
std::string shape_of(const ModelBench& bench) {
  const std::string batch = fmt::format("{}x{}", bench.batch, bench.length);
  return bench.accumulate > 1 ? fmt::format("{} of {}", bench.accumulate, batch) : batch;
}

PlainJson figures(const Samples& s) { return {{"median", s.median()}, {"best", s.best()}}; }

}  // namespace

PlainJson bench_train(const ModelBench& bench) {
  if (bench.steps < 1) fail_usage("--steps: expected a whole number >= 1, got {}", bench.steps);
  require_memory_of_step(bench.model, config_of(bench));
  const TemporaryFolder folder;
  const std::shared_ptr<const Tokenizer> tokenizer = byte_tokenizer();
  const std::string path = folder.path() + "/text.tokens";
  write_token_file(random_text(std::max<size_t>(size_t{1} << 20, static_cast<size_t>(4 * bench.batch * bench.length))),
                   "", *tokenizer, path);
  const auto tokens = std::make_shared<const TokenFile>(path);

  const double step_tokens = static_cast<double>(bench.batch * bench.length * bench.accumulate);
  say("training: {}; {} tokens a step, {} threads; {} steps twice in turn\n", describe(bench.model), shape_of(bench),
      num_threads(), bench.steps);
  std::fflush(stdout);
  const std::vector<std::string> precisions{"f32", "bf16"};
  std::vector<TrainResult> results(precisions.size());
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < precisions.size(); ++i) train_once(bench, precisions[i], tokenizer, tokens, results[i]);
  }
  Table table;
  table.column("precision", Table::Align::kLeft);
  for (const char* heading : {"tok/s median", "tok/s best", "ms/step median", "ms/step best", "peak memory"})
    table.column(heading);
  PlainJson rows = PlainJson::array();
  for (size_t i = 0; i < precisions.size(); ++i) {
    const TrainResult& r = results[i];
    table.row({precisions[i], fmt::format("{:.0f}", 1e3 * step_tokens / r.ms.median()),
               fmt::format("{:.0f}", 1e3 * step_tokens / r.ms.best()), fmt::format("{:.1f}", r.ms.median()),
               fmt::format("{:.1f}", r.ms.best()), format_bytes(static_cast<double>(r.peak))});
    rows.push_back({{"precision", precisions[i]},
                    {"ms_per_step", figures(r.ms)},
                    {"tokens_per_second",
                     {{"median", 1e3 * step_tokens / r.ms.median()}, {"best", 1e3 * step_tokens / r.ms.best()}}},
                    {"peak_bytes", r.peak}});
  }
  say("{}", table.text());
  return {{"model", describe(bench.model)},
          {"batch", bench.batch},
          {"length", bench.length},
          {"accumulate", bench.accumulate},
          {"results", rows}};
}

namespace {

// Of another communicator: the time of its calls, each from when all ranks have come to it until it is done.
class TimedRanks final : public Communicator {
 public:
  TimedRanks(Communicator& host, Communicator& timed, Device& device) : host_(host), timed_(timed), device_(device) {}
  int rank() const override { return timed_.rank(); }
  int size() const override { return timed_.size(); }
  void all_to_all(std::span<const ConstPart> send, std::span<const Part> receive) override {
    time([&] { timed_.all_to_all(send, receive); });
  }
  void all_gather(std::span<const Part> parts) override {
    time([&] { timed_.all_gather(parts); });
  }
  void broadcast(Part data, int from) override {
    time([&] { timed_.broadcast(data, from); });
  }
  void barrier() override { timed_.barrier(); }

  void set_timing(bool on) { timing_ = on; }
  double take_seconds() { return std::exchange(seconds_, 0.0); }

 private:
  // Without timing nothing waits.
  template <class Call>
  void time(const Call& call) {
    if (!timing_) return call();
    device_.synchronise();
    host_.barrier();
    seconds_ += seconds_of([&] {
      call();
      device_.synchronise();
    });
  }

  Communicator& host_;
  Communicator& timed_;
  Device& device_;
  bool timing_ = false;
  double seconds_ = 0;
};

// An optimiser's step on this rank: alone, or together with others.
struct TimedStep {
  TimedStep(Communicator& ranks, const ModelBench& bench, const MemoryPlan& plan, LanguageModel<float>& of)
      : model(of) {
    const AdamWConfig adamw = {.moments = plan.format, .seed = 1};
    if (ranks.size() == 1) {
      alone.emplace(adamw, model.params());
      return;
    }
    transport = device_ranks(ranks, model.device());
    sending.emplace(ranks, *transport.tensors, model.device());
    together.emplace(ranks, *sending, adamw, model.params(),
                     bench.sums == "apart" ? GradientSums::kApart : GradientSums::kLocal);
  }
  void run(std::span<const Batch> batches) {
    if (together) {
      together->step(model, batches, 1e-4, 1.0);
    } else {
      train_step(model, *alone, batches, 1e-4, 1.0);
    }
  }

  LanguageModel<float>& model;
  DeviceRanks transport;
  std::optional<TimedRanks> sending;
  std::optional<AdamW> alone;
  std::optional<DataParallel<float>> together;
};

}  // namespace

// A step's time is also given as a multiple of what its matrix products take alone, right after it on the same card:
// the products as one step queues them, in its order.
PlainJson bench_train_device(const ModelBench& bench, Communicator& ranks) {
  if (bench.steps < 1) fail_usage("--steps: expected a whole number >= 1, got {}", bench.steps);
  Device& device = device_named(bench.device);
  const int count = ranks.size();
  const MemoryPlan plan = plan_memory(bench.model, config_of(bench), count);
  const std::string where =
      count > 1 ? fmt::format("{} ranks, each with {}", count, device_info().name) : device_info().name;
  say("training: {}; {} tokens a step, {}; {} steps; recompute {}, moments {}; {} planned\n", describe(bench.model),
      shape_of(bench), where, bench.steps, describe(plan.recompute, bench.model.num_hidden_layers),
      name_of(plan.format), format_bytes(static_cast<double>(plan.total())));
  std::fflush(stdout);
  const double planned = seconds_since_process_start();
  LanguageModel<float> model(bench.model, device);
  model.set_recompute(plan.recompute);
  model.reserve_scratch(plan.scratch);
  device.synchronise();
  const double allocated = seconds_since_process_start();
  Random random(1);
  model.init(random);
  device.synchronise();
  const double drawn = seconds_since_process_start();
  TimedStep trained(ranks, bench, plan, model);
  Samples ms, products_ms, sending_ms;
  double first_ms = 0, first_step = 0;
  const auto step = [&] {
    std::vector<Batch> batches;
    for (int64_t i = 0; i < bench.accumulate; ++i) batches.push_back(random_batch(bench, random));
    ranks.barrier();
    return 1e3 * seconds_of([&] {
             trained.run(batches);
             if (count > 1) device.synchronise();
           });
  };
  for (int64_t i = 0; i < kWarmSteps + bench.steps; ++i) {
    if (any_rank(ranks, stop_flag().load()))
      throw Stopped(fmt::format("bench: stopped after {} of {} training steps", i, kWarmSteps + bench.steps));
    const double taken = step();
    if (i == 0) first_ms = taken, first_step = seconds_since_process_start();
    if (i >= kWarmSteps) ms.add(taken);
  }
  const size_t peak = device.peak_bytes();
  if (count > 1) {
    trained.sending->set_timing(true);
    for (int i = 0; i < 5; ++i) {
      step();
      sending_ms.add(1e3 * trained.sending->take_seconds());
    }
    trained.sending->set_timing(false);
  }
  ProductRecord record;
  step();
  for (const double seconds : record.seconds_alone(device, static_cast<int>(std::min<int64_t>(bench.steps, 20))))
    products_ms.add(1e3 * seconds);

  const double step_tokens = static_cast<double>(bench.batch * bench.length * bench.accumulate),
               ktok_s = step_tokens / ms.median(), ratio = ms.median() / products_ms.median();
  const double peak_gib = static_cast<double>(peak) / 0x1p30;
  Table table;
  for (const char* heading : {"ktok/s median", "ktok/s best", "ms/step median", "ms/step best", "its products ms",
                              "step/products", "first step ms", "from start s", "peak GiB"})
    table.column(heading);
  table.row({fmt::format("{:.2f}", ktok_s), fmt::format("{:.2f}", step_tokens / ms.best()),
             fmt::format("{:.1f}", ms.median()), fmt::format("{:.1f}", ms.best()),
             fmt::format("{:.1f}", products_ms.median()), fmt::format("{:.3f}", ratio), fmt::format("{:.1f}", first_ms),
             fmt::format("{:.2f}", first_step), fmt::format("{:.2f}", peak_gib)});
  say("from the start of the process: device and plan {:.2f} s, memory {:.2f}, parameters {:.2f}, first step {:.2f}\n",
      planned, allocated, drawn, first_step);
  say("{}{} products of {:.1f} TFLOP in all: {:.0f} TFLOP/s alone\n", table.text(), record.count(),
      record.flops() / 1e12, record.flops() / products_ms.median() / 1e9);
  PlainJson report = {
      {"model", describe(bench.model)},
      {"shape", shape_of(bench)},
      {"batch", bench.batch},
      {"length", bench.length},
      {"accumulate", bench.accumulate},
      {"recompute", describe(plan.recompute, bench.model.num_hidden_layers)},
      {"moments", name_of(plan.format)},
      {"memory", bench.memory},
      {"device", device_info().name},
      {"ms_per_step", figures(ms)},
      {"products", record.count()},
      {"products_flops", record.flops()},
      {"products_ms", figures(products_ms)},
      {"tokens_per_second", {{"median", 1e3 * ktok_s}, {"best", 1e3 * step_tokens / ms.best()}}},
      {"ktok_s", ktok_s},
      {"step_over_products", ratio},
      {"first_step_ms", first_ms},
      {"first_step_s", first_step},
      {"start_s", {{"plan", planned}, {"memory", allocated}, {"parameters", drawn}, {"first_step", first_step}}},
      {"planned_bytes", plan.total()},
      {"peak_bytes", peak},
      {"peak_gib", peak_gib}};
  if (count > 1) {
    const double share = sending_ms.median() / ms.median();
    say("{} ranks together; tensors go by {}; sending takes {:.1f} ms of a step, {:.1f}%\n", count,
        trained.transport.name, sending_ms.median(), 100 * share);
    report.update({{"ranks", count},
                   {"sums", bench.sums},
                   {"carrier", trained.transport.name},
                   {"sending_ms", figures(sending_ms)},
                   {"sending_share", share}});
  }
  return report;
}

namespace {

std::vector<int32_t> random_ids(int64_t count, int64_t vocab) {
  Random random(3);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random.below(static_cast<uint64_t>(vocab)));
  return ids;
}

// Greedy decoding of copies of one text: a token at a time, and with drafts that are the tokens which that gave.
struct DraftTimes {
  Samples plain_ms, drafted_ms;  // of a token of each sequence
  double accepted = 0;           // share of the drafts that were drawn; none is taken back
};

DraftTimes time_drafts(LanguageModel<float>& model, int64_t drafts, int64_t sequences, int64_t seen) {
  constexpr int64_t kWarm = 4, kPasses = 24;
  const int64_t vocab = model.config().vocab_size, width = drafts + 1, all = kWarm + kPasses;
  DraftTimes times;
  Sampling greedy;
  greedy.temperature = 0;
  ModelState<float> prompt(model.config(), 1, model.device());
  std::vector<float> logits(static_cast<size_t>(vocab));
  model.forward_last(random_ids(seen, vocab), SeqLayout({0, seen}), prompt, Mat<float>(logits.data(), 1, vocab));
  ModelState<float> state(model.config(), sequences, model.device());
  const auto begin = [&](auto& decoder) {
    for (int64_t n = 0; n < sequences; ++n) {
      state.put(n, prompt);
      decoder.begin(n, logits, {});
    }
  };
  const std::vector<double> uniform(static_cast<size_t>(sequences * width));
  std::vector<int32_t> text;
  const auto plain = model.decoder(state);
  begin(*plain);
  for (int64_t i = 0; i < all * width; ++i) {
    stop_point("bench", i, all * width, "tokens");
    const double taken = seconds_of([&] {
      plain->sample(vocab, greedy, std::span(uniform).first(static_cast<size_t>(sequences)), false);
      plain->step();
      text.push_back(plain->wait()[0].id);
    });
    if (i >= kWarm * width) times.plain_ms.add(1e3 * taken);
  }
  const auto drafted = model.draft_decoder(state, drafts);
  begin(*drafted);
  int64_t right = 0;
  for (int64_t i = 0; i < all; ++i) {
    stop_point("bench", i, all, "passes");
    std::vector<int32_t> ids;
    for (int64_t n = 0; n < sequences; ++n)
      ids.insert(ids.end(), text.begin() + i * width, text.begin() + (i + 1) * width);
    std::span<const Drawn> drawn;
    const double taken = seconds_of([&] { drawn = drafted->read(width, ids, vocab, greedy, uniform, false); });
    if (i >= kWarm) times.drafted_ms.add(1e3 * taken / static_cast<double>(width));
    for (int64_t row = 0; row < sequences * width; ++row) {
      const auto at = static_cast<size_t>(row);
      if (row % width < drafts && drawn[at].id == ids[at + 1]) ++right;
    }
  }
  times.accepted = static_cast<double>(right) / static_cast<double>(all * sequences * drafts);
  return times;
}

void check_drafts(const ModelBench& bench, const LanguageModel<float>& model) {
  if (bench.decode_drafts != 0) model.require_drafts(bench.decode_drafts);
}

double tokens_per_second(int64_t sequences, double ms) { return 1e3 * static_cast<double>(sequences) / ms; }

}  // namespace

PlainJson bench_decode(const ModelBench& bench) {
  constexpr int64_t kWarm = 100, kBlock = 50, kRounds = 40;
  if (bench.decode_tokens < 2 * kWarm)
    fail_usage("--decode-tokens: expected at least {}, got {}", 2 * kWarm, bench.decode_tokens);
  if (bench.device == "cpu")
    require_memory(parameter_count(bench.model) * sizeof(float), "the model",
                   "lower hidden_size or num_hidden_layers; --no-check-memory tries all the same");
  LanguageModel<float> model(bench.model, device_named(bench.device));
  model.set_decode_ring(bench.decode_ring);
  Random random(1);
  model.init(random);
  const auto tokenizer = byte_tokenizer();
  const Sampling sampling;
  const auto generate = [&](Session& session, int64_t count) {
    return seconds_of([&] {
      for (int64_t i = 0; i < count; ++i) {
        stop_point("bench", session.tokens_seen(), bench.decode_tokens, "tokens");
        session.next(sampling);
      }
    });
  };
  check_drafts(bench, model);
  require_memory_of_decoding(model, 1, "--no-check-memory tries all the same", bench.decode_drafts);
  say("decoding: {}; {} tokens, {} threads\n", describe(bench.model), bench.decode_tokens, num_threads());
  std::fflush(stdout);

  Session far(model, *tokenizer, 1);
  generate(far, kWarm);  // memory is touched
  const int64_t first_bytes = resident_bytes();
  const double seconds = generate(far, bench.decode_tokens - kWarm);
  const int64_t last_bytes = resident_bytes();
  // A session at the end of the long text and one at its start take turns, so that a machine that is slower for a while
  // is slower for both.
  Session near(model, *tokenizer, 1);
  generate(near, kWarm);
  Samples first_us, last_us;
  for (int64_t round = 0; round < kRounds; ++round) {
    first_us.add(1e6 * generate(near, kBlock) / static_cast<double>(kBlock));
    last_us.add(1e6 * generate(far, kBlock) / static_cast<double>(kBlock));
  }
  Table table;
  table.column("at token", Table::Align::kLeft);
  for (const char* heading : {"us/token median", "us/token best", "memory"}) table.column(heading);
  const auto row = [&](int64_t at, const Samples& us, int64_t bytes) {
    table.row({fmt::format("{}", at), fmt::format("{:.1f}", us.median()), fmt::format("{:.1f}", us.best()),
               format_bytes(static_cast<double>(bytes))});
    return PlainJson{{"at_token", at}, {"us_per_token", figures(us)}, {"resident_bytes", bytes}};
  };
  PlainJson first = row(kWarm, first_us, first_bytes);
  PlainJson last = row(bench.decode_tokens, last_us, last_bytes);
  say("{}{} tokens in {:.1f} s; state: {}\n", table.text(), bench.decode_tokens, seconds,
      format_bytes(static_cast<double>(far.state_bytes())));
  PlainJson report = {{"model", describe(bench.model)},   {"tokens", bench.decode_tokens}, {"seconds", seconds},
                      {"state_bytes", far.state_bytes()}, {"first", std::move(first)},     {"last", std::move(last)}};
  if (bench.decode_drafts > 0) {
    const DraftTimes times = time_drafts(model, bench.decode_drafts, 1, kWarm);
    const double plain = tokens_per_second(1, times.plain_ms.median()),
                 drafted = tokens_per_second(1, times.drafted_ms.median());
    say("{} drafts, {:.1f}% drawn: {:.0f} tok/s; without: {:.0f} tok/s; {:.2f} times\n", bench.decode_drafts,
        100 * times.accepted, drafted, plain, drafted / plain);
    report.update(
        {{"drafts", bench.decode_drafts}, {"drafted_tok_s", drafted}, {"tok_s", plain}, {"accepted", times.accepted}});
  }
  return report;
}

namespace {

// One prompt passes in a session's pieces; several pass side by side in one piece.
PlainJson time_prefill(const ModelBench& bench, LanguageModel<float>& model, const Tokenizer& tokenizer) {
  constexpr int64_t kPrefills = 5;
  const int64_t sequences = bench.prefill_sequences, all = sequences * bench.prefill, vocab = bench.model.vocab_size;
  const std::vector<int32_t> ids = random_ids(all, vocab);
  const SeqLayout layout = SeqLayout::uniform(sequences, bench.prefill);
  std::vector<float> logits(static_cast<size_t>(sequences * vocab));
  Samples ms;
  for (int64_t i = 0; i <= kPrefills; ++i) {
    stop_point("bench", i, kPrefills + 1, "prompts");
    double taken = 0;
    if (sequences == 1) {
      Session session(model, tokenizer, 1);
      taken = seconds_of([&] { session.prefill(ids); });
    } else {
      ModelState<float> state(bench.model, sequences, model.device());
      taken = seconds_of([&] { model.forward_last(ids, layout, state, Mat<float>(logits.data(), sequences, vocab)); });
    }
    if (i > 0) ms.add(1e3 * taken);  // the first makes ready
  }
  const double tok_s = 1e3 * static_cast<double>(all) / ms.median();
  const std::string prompts = sequences == 1 ? "" : fmt::format("{} times ", sequences);
  say("prefill of {}{} tokens: {:.1f} ms (best {:.1f}), {:.0f} tok/s\n", prompts, bench.prefill, ms.median(), ms.best(),
      tok_s);
  return {{"model", describe(bench.model)},
          {"sequences", sequences},
          {"tokens", bench.prefill},
          {"ms", figures(ms)},
          {"tok_s", tok_s}};
}

}  // namespace

// Each row's tokens are timed one by one, from when the host has one to when it has the next; those before the first
// twenty make ready.
PlainJson bench_generation(const ModelBench& bench) {
  constexpr int64_t kWarm = 20;
  for (const int64_t n : bench.decode_sequences) {
    if (n < 1) fail_usage("--decode-sequences: expected whole numbers >= 1, got {}", n);
  }
  std::vector<int64_t> seen = bench.decode_seen;
  if (seen.empty()) seen.push_back(512);
  for (const int64_t n : seen) {
    if (n < 1) fail_usage("--decode-seen: expected whole numbers >= 1, got {}", n);
  }
  if (bench.prefill < 0) fail_usage("--prefill: expected a whole number >= 0, got {}", bench.prefill);
  if (bench.prefill_sequences < 1)
    fail_usage("--prefill-sequences: expected a whole number >= 1, got {}", bench.prefill_sequences);
  const int64_t tokens = std::min<int64_t>(bench.decode_tokens, 64);  // of a row: so that `seen` is what it says
  if (tokens < 1) fail_usage("--decode-tokens: expected at least 1, got {}", tokens);
  Device& device = device_named(bench.device);
  if (bench.device == "cpu")
    require_memory(parameter_count(bench.model) * sizeof(float), "the model",
                   "lower hidden_size or num_hidden_layers; --no-check-memory tries all the same");
  LanguageModel<float> model(bench.model, device);
  model.set_decode_ring(bench.decode_ring);
  Random random(1);
  model.init(random);
  const auto tokenizer = byte_tokenizer();
  Sampling greedy;
  greedy.temperature = 0;
  check_drafts(bench, model);
  if (!bench.decode_sequences.empty()) {
    require_memory_of_decoding(model, *std::ranges::max_element(bench.decode_sequences),
                               "lower --decode-sequences; --no-check-memory tries all the same", bench.decode_drafts);
  }
  const std::string on = bench.device == "cpu" ? fmt::format("{} threads", num_threads()) : device_info().name;
  say("generation: {}; {}\n", describe(bench.model), on);
  std::fflush(stdout);
  PlainJson report = {{"model", describe(bench.model)},
                      {"device", on},
                      {"results", PlainJson::array()},
                      {"prefill", PlainJson::array()}};
  if (bench.prefill > 0) report["prefill"].push_back(time_prefill(bench, model, *tokenizer));
  Table table;
  for (const char* heading : {"sequences", "seen", "tok/s median", "tok/s best", "ms/token median"})
    table.column(heading);
  if (bench.decode_drafts > 0) {
    for (const char* heading : {"with drafts", "times", "drawn"}) table.column(heading);
  }
  for (const int64_t at : bench.decode_sequences.empty() ? std::vector<int64_t>() : seen) {
    Session prompt(model, *tokenizer, 1);
    prompt.prefill(random_ids(at, bench.model.vocab_size));
    for (const int64_t sequences : bench.decode_sequences) {
      SessionBatch batch(model, *tokenizer, sequences);
      for (int64_t n = 0; n < sequences; ++n) batch.put(n, prompt);
      Samples ms;
      for (int64_t i = 0; i < kWarm + tokens; ++i) {
        stop_point("bench", i, kWarm + tokens, "tokens");
        const double taken = 1e3 * seconds_of([&] { batch.next(greedy, false); });
        if (i >= kWarm) ms.add(taken);
      }
      const auto rate = [&](double one) { return tokens_per_second(sequences, one); };
      std::vector<std::string> cells = {fmt::format("{}", sequences), fmt::format("{}", at),
                                        fmt::format("{:.0f}", rate(ms.median())),
                                        fmt::format("{:.0f}", rate(ms.best())), fmt::format("{:.3f}", ms.median())};
      PlainJson row = {{"model", describe(bench.model)},
                       {"sequences", sequences},
                       {"seen", at},
                       {"tok_s", rate(ms.median())},
                       {"ms_per_token", figures(ms)}};
      if (bench.decode_drafts > 0) {
        const DraftTimes times = time_drafts(model, bench.decode_drafts, sequences, at);
        const double drafted = rate(times.drafted_ms.median());
        cells.push_back(fmt::format("{:.0f}", drafted));
        cells.push_back(fmt::format("{:.2f}", drafted / rate(times.plain_ms.median())));
        cells.push_back(fmt::format("{:.1f}%", 100 * times.accepted));
        row.update({{"drafts", bench.decode_drafts}, {"drafted_tok_s", drafted}, {"accepted", times.accepted}});
      }
      table.row(cells);
      report["results"].push_back(std::move(row));
    }
  }
  if (!bench.decode_sequences.empty()) say("{}", table.text());
  return report;
}

}  // namespace fw::cli
