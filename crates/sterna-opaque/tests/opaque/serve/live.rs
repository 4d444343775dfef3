//! Both sides of QEMU's form: an image that is served, and a VM of the engine that runs it.

use std::sync::Arc;
use std::time::Duration;

use sterna::ram::missing_pages::MissingPages;
use sterna::{Address, Arrival, Capabilities, Outcome, RunState};
use sterna_guests::model::{Acts, Fill};
use sterna_guests::process::ProcessConfig;
use sterna_opaque::serve::{Dial, ImageOptions, ServeOptions, ServedImage, Serving};

use crate::common;

/// Four workers that write pages, or zero them, over pages of every kind.
fn config() -> ProcessConfig {
    ProcessConfig {
        blocks: vec![("ram.low".into(), 24 << 20), ("ram.high".into(), 8 << 20)],
        fill: Fill::Half(7),
        acts: Acts::MIXED,
        workers: 4,
        seed: 17,
        ..common::config()
    }
}

#[test]
fn image_that_is_served_runs_in_a_vm_of_this_engine_at_once() {
    for preempt in [false, true] {
        if let Err(error) = MissingPages::probe() {
            assert!(std::env::var_os("CI").is_none(), "{error}");
            tracing::warn!("skipped: {error}");
            return;
        }
        let on = Capabilities { postcopy_ram: true, postcopy_preempt: preempt, ..Capabilities::default() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("guest");
        let (source, target) = common::pair(&config());
        assert!(source.wait_progress(50, Duration::from_secs(20)));
        let mapped = Capabilities { mapped_ram: true, ..Capabilities::default() };
        let file = Address::File { path: path.clone(), offset: 0 };
        let saved = common::start(&source, &file, &common::parameters(), mapped, Arc::new(())).wait();
        assert!(matches!(saved, Outcome::Completed), "{saved:?}");

        let incoming = common::listen(&target, &common::parameters(), on);
        let image = Arc::new(ServedImage::open(&path, &ImageOptions::default()).unwrap());
        let options = ServeOptions { preempt, limits: common::LIMITS, ..ServeOptions::default() };
        let serving = Serving::start(image, Arc::new(Dial(incoming.address())), options).unwrap();
        serving.wait().unwrap();
        let arrival = incoming.wait();
        assert!(matches!(arrival, Arrival::Completed(RunState::Running)), "{arrival:?}");
        common::assert_lives_on(&target);
    }
}
