#include "tasks/key_words.h"

namespace fw {
namespace {

constexpr std::string_view kAdjectives[] = {
    "able",    "ample",  "ancient", "angry",   "apt",    "arid",    "atomic",   "austere", "autumnal", "azure",
    "bald",    "basic",  "beady",   "bitter",  "bland",  "blunt",   "bold",     "boreal",  "brash",    "brave",
    "brief",   "bright", "brisk",   "brittle", "broad",  "bronze",  "bulky",    "calm",    "candid",   "casual",
    "central", "cheap",  "chief",   "chilly",  "civil",  "classy",  "clean",    "clear",   "clever",   "close",
    "cloudy",  "coarse", "cold",    "common",  "coral",  "cosmic",  "crafty",   "crisp",   "crude",    "curious",
    "curly",   "damp",   "dapper",  "daring",  "dense",  "direct",  "distant",  "dizzy",   "double",   "dreary",
    "dry",     "dull",   "dusty",   "eager",   "early",  "earnest", "easy",     "elastic", "elder",    "elegant",
    "empty",   "equal",  "exact",   "fabled",  "faint",  "fair",    "famous",   "fancy",   "feral",    "fertile",
    "fierce",  "final",  "firm",    "flat",    "fluent", "foggy",   "fond",     "formal",  "frail",    "frank",
    "fresh",   "frosty", "frugal",  "full",    "funny",  "gaudy",   "gentle",   "giant",   "gifted",   "glad",
    "glossy",  "golden", "grand",   "grassy",  "grave",  "green",   "grim",     "happy",   "hardy",    "harsh",
    "hasty",   "hazy",   "heavy",   "hidden",  "hollow", "honest",  "humble",   "icy",     "ideal",    "idle",
    "inner",   "jagged", "jolly",   "jumpy",   "keen",   "kind",    "lanky",    "large",   "late",     "lavish",
    "lazy",    "lean",   "legal",   "light",   "limber", "little",  "lively",   "local",   "lofty",    "lonely",
    "long",    "loose",  "loud",    "loyal",   "lucid",  "lucky",   "lunar",    "mad",     "magic",    "major",
    "meager",  "mellow", "merry",   "mild",    "minor",  "misty",   "modest",   "moist",   "muddy",    "mute",
    "narrow",  "nasty",  "native",  "neat",    "nimble", "noble",   "noisy",    "novel",   "odd",      "open",
    "oval",    "pale",   "paltry",  "patient", "plain",  "plucky",  "polite",   "prime",   "proud",    "pure",
    "quaint",  "quick",  "quiet",   "rapid",   "rare",   "ready",   "regal",    "rich",    "rigid",    "ripe",
    "robust",  "rocky",  "rough",   "round",   "royal",  "rural",   "rusty",    "sable",   "salty",    "sandy",
    "scarce",  "sharp",  "shiny",   "short",   "shy",    "silent",  "simple",   "sleek",   "slim",     "slow",
    "smart",   "smooth", "snowy",   "sober",   "soft",   "solar",   "solid",    "sour",    "spare",    "steady",
    "steep",   "stern",  "stiff",   "stormy",  "strict", "sturdy",  "subtle",   "sunny",   "swift",    "tacit",
    "tame",    "tart",   "tender",  "tidy",    "tiny",   "tough",   "tranquil", "trim",    "true",     "upbeat",
    "urban",   "vague",  "vast",    "vivid",   "warm",   "wary",    "weary",    "wide",    "wild",     "windy",
    "wise",    "witty",  "woolly",  "young",   "zany",   "zesty"};

constexpr std::string_view kNouns[] = {
    "acorn",   "anchor",   "anvil",   "apple",   "apron",   "arch",     "arrow",    "atlas",   "attic",    "badge",
    "bakery",  "balcony",  "ballad",  "bamboo",  "banner",  "barley",   "barrel",   "basin",   "basket",   "beacon",
    "beaver",  "bell",     "bench",   "bicycle", "birch",   "blanket",  "blossom",  "bottle",  "bridge",   "broom",
    "bucket",  "cabin",    "cactus",  "camel",   "candle",  "canoe",    "canyon",   "carpet",  "castle",   "cedar",
    "cello",   "chain",    "chalk",   "chapel",  "cherry",  "chimney",  "circle",   "clock",   "cloud",    "clover",
    "coast",   "comet",    "compass", "copper",  "corner",  "cottage",  "cotton",   "crane",   "crater",   "cricket",
    "crown",   "crystal",  "curtain", "cushion", "daisy",   "desert",   "diary",    "dolphin", "donkey",   "dragon",
    "drum",    "eagle",    "easel",   "echo",    "elbow",   "ember",    "engine",   "falcon",  "feather",  "fence",
    "ferry",   "fiddle",   "field",   "finch",   "flame",   "flute",    "forest",   "fossil",  "fountain", "fox",
    "galaxy",  "garden",   "garlic",  "gate",    "ginger",  "glacier",  "globe",    "glove",   "goose",    "granite",
    "grape",   "guitar",   "hammer",  "harbor",  "harp",    "hazel",    "helmet",   "heron",   "hill",     "honey",
    "horizon", "hotel",    "igloo",   "island",  "ivory",   "jacket",   "jaguar",   "jasmine", "jewel",    "jungle",
    "kettle",  "kite",     "kitten",  "ladder",  "lagoon",  "lamp",     "lantern",  "lemon",   "leopard",  "letter",
    "library", "lily",     "linen",   "lizard",  "lobster", "locket",   "lotus",    "magnet",  "mango",    "maple",
    "marble",  "market",   "meadow",  "melon",   "mirror",  "mitten",   "mountain", "museum",  "napkin",   "needle",
    "nest",    "notebook", "nutmeg",  "oasis",   "ocean",   "olive",    "onion",    "orbit",   "orchard",  "otter",
    "owl",     "oyster",   "paddle",  "palace",  "panther", "parade",   "parcel",   "parrot",  "pasture",  "pebble",
    "pelican", "pencil",   "pepper",  "piano",   "pigeon",  "pillow",   "pirate",   "planet",  "plaza",    "plum",
    "pocket",  "pond",     "pony",    "prairie", "prism",   "pumpkin",  "puzzle",   "quarry",  "quilt",    "rabbit",
    "raccoon", "radish",   "raft",    "rainbow", "raven",   "ribbon",   "river",    "robin",   "rocket",   "saddle",
    "sailor",  "salmon",   "satchel", "scarf",   "school",  "shadow",   "shelter",  "shovel",  "signal",   "silver",
    "skater",  "sparrow",  "spider",  "spoon",   "spruce",  "stable",   "statue",   "stove",   "summit",   "swan",
    "table",   "tailor",   "teapot",  "temple",  "thistle", "thunder",  "tiger",    "timber",  "tower",    "trail",
    "trumpet", "tulip",    "tunnel",  "turnip",  "turtle",  "umbrella", "valley",   "velvet",  "village",  "violin",
    "volcano", "wagon",    "walnut",  "walrus",  "water",   "whistle",  "willow",   "window",  "winter",   "wolf",
    "yarn",    "zebra"};

}  // namespace

std::span<const std::string_view> key_adjectives() { return kAdjectives; }
std::span<const std::string_view> key_nouns() { return kNouns; }

}  // namespace fw
