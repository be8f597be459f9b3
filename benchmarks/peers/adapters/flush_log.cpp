// llama.cpp's programs lose what their logger has not printed when they end, and the example prints its counts last.

#include "log.h"

#include <cstdlib>

static const int registered = std::atexit([] { common_log_pause(common_log_main()); });
