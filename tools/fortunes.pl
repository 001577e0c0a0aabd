#!/usr/bin/perl
# The quotations of Debian's package fortunes as one text on standard output: documents that a line "%" ends.
# tools/fortunes.pl [FOLDER]. perl because every Debian has it.
use strict;
use warnings;
use List::Util qw(shuffle);

my $folder = shift // "/usr/share/games/fortunes";
# Plain text files only: beside each lie an index (.dat) and a link (.u8). Drawings are left out: this is for language.
my @files = grep { -f && !-l && !/\.(dat|u8)$/ && !m{/ascii-art$} } sort glob("\Q$folder\E/*");
die "fortunes: expected text files in $folder, found none; install the package fortunes\n" unless @files;

my @quotes;
for my $file (@files) {
  open(my $in, "<", $file) or die "fortunes: $file: $!\n";
  local $/;
  my $text = <$in>;
  $text =~ s/.\x08//g;    # overstriking: a letter, a backspace and the letter that stays
  $text =~ s/\r//g;
  for my $quote (split(/^%[ \t]*\n/m, $text)) {
    $quote =~ s/[ \t]+$//mg;
    $quote =~ s/\A\n+|\n+\z//g;
    push @quotes, $quote if length $quote;
  }
}
# One order for everybody, mixed: the last tenth, which is held out, is then as the rest and not about one subject.
srand(1);
print "$_\n%\n" for shuffle(@quotes);
