// Which build of the program this is.
#pragma once

#include <string>

namespace fw::cli {

// The commit that it was built of, its first eight digits; with "+" behind them where files differed from it. "" where
// the sources were no checkout of git.
std::string build_commit();
// "fastweight 0.2.0, commit 0123abcd", or the version alone.
std::string build_name();

}  // namespace fw::cli
