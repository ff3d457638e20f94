// Catch, compiled once. A program that has no main of its own gets one that does just this.
#pragma once

int run_tests(int argc, char** argv);
