//! A destination without postcopy, because the feature `postcopy` is off: the machine requests none of this.

use sterna_proto::destination::Destination;

use super::Control;
use crate::driver::Driver;

impl Control {
    pub(super) fn say_started(&mut self) {}

    pub(super) fn finish_pages(&mut self, _: &Driver<Destination>) {}

    pub(super) fn keep_waiting(&mut self) {}

    pub(super) fn recover(&mut self) {}

    pub(super) fn say_resumed(&mut self) {}

    pub(super) fn why_pages_do_not_come(&self) -> String {
        String::new()
    }
}
