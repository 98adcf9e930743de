//! The programs as users start them, under our own client.

mod gpio;
mod program;
mod serial;
