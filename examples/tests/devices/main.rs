//! The programs as users start them, under our own client.

mod gpio;
mod guide;
mod program;
mod serial;
