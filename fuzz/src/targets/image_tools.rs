//! A whole image, read by every tool. An image that `verify` calls sound must open. No tool may panic.

use std::sync::Arc;

use sterna_image::tools::coverage::Coverage;
use sterna_image::tools::inspect::inspect;
use sterna_image::tools::picture::picture;
use sterna_image::tools::state::State;
use sterna_image::tools::verify::{VerifyOptions, verify_source};
use sterna_image::{Form, Image};

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let options = VerifyOptions { threads: 1, digest: true };
    let verdict = verify_source(Arc::new(data.to_vec()), "fuzz", &options);
    let image = Image::open_source(Arc::new(data.to_vec()), "fuzz");
    if let Ok(verdict) = &verdict
        && verdict.is_sound()
    {
        assert!(image.is_ok(), "sound, and does not open");
        assert!(verdict.data_pages + verdict.zero_pages <= verdict.ram_bytes / 4096);
    }
    let Ok(image) = image else { return };
    // A legacy stream may announce far more RAM than it holds.
    if image.format().form() == Form::Legacy && image.shape().ram_bytes() > 64 << 20 {
        return;
    }
    let Ok(coverage) = Coverage::of(&image) else { return };
    let inspection = inspect(&image, &coverage).unwrap();
    assert!(picture(&inspection, &coverage).ends_with("</svg>\n"));
    let state = State::of(&image);
    let _ = state.registers();
    let map = state.memory_map(&[], None);
    for pair in map.regions.windows(2) {
        assert!(pair[0].address + pair[0].length_bytes <= pair[1].address);
    }
}
