//! Layout of a vCPU's control page: 512 little-endian 64-bit words. The control page of vCPU i is the page
//! at [`super::LOAD_ADDRESS`]` + 4096 · (1 + i)`.
//!
//! Words that only the image sets are constants of the guest; the checker demands their values. The host
//! writes the words whose names begin with `REQUEST`: first the requested values, then [`REQUEST_COUNT`],
//! incremented by one.

use sterna_ram::PAGE_SIZE;

use super::{Tide, layout};
use crate::model::WORDS_PER_PAGE;

/// Constant: the value [`MAGIC_VALUE`].
pub const MAGIC: usize = 0;
/// Constant: the vCPU's index shifted left by 40. Added to a page's number, it gives the page's identity.
pub const IDENTITY: usize = 1;
/// Number of complete steps: the counter S of the model.
pub const STEPS: usize = 2;
/// Iterations of the main loop. An iteration takes 8 steps at full speed, otherwise one or none.
pub const BEATS: usize = 3;
/// The largest number of ticks of the time-stamp counter between two beats.
pub const MAX_GAP: usize = 4;
/// The time-stamp counter at the last beat.
pub const LAST_BEAT: usize = 5;
/// Constant: seed of the patterns.
pub const SEED: usize = 6;
/// [`STEPS`] of the next vCPU, read before the step in flight began. The last vCPU reads the
/// first's.
pub const WITNESS: usize = 7;
/// Constant: distance from this control page to the next vCPU's, in bytes, signed.
pub const NEIGHBOUR: usize = 8;
/// Constant: guest-physical address of page 0 of the share.
pub const FIRST_SEGMENT: usize = 9;
/// Constant: pages in the first segment.
pub const SPLIT: usize = 10;
/// Constant: the summand that gives, with 4096 · page, the address of pages from [`SPLIT`] on.
pub const SECOND_SEGMENT: usize = 11;
/// Constant: pages in the share.
pub const SHARE_PAGES: usize = 12;
/// Constant: ticks between two lines on the serial port.
pub const LINE_TICKS: usize = 13;
/// Number of times that the time-stamp counter was less than an earlier reading.
pub const CLOCK_WENT_BACK: usize = 14;
/// Number of refused requests: unknown pattern, or no space for another epoch.
pub const REFUSED: usize = 15;
/// Number of requests so far.
pub const REQUEST_COUNT: usize = 16;
/// Requested value: number of the pattern.
pub const REQUEST_PATTERN: usize = 17;
/// Requested value: pages of the working set. 0, or more than the share, means the share.
pub const REQUEST_WORKING_SET: usize = 18;
/// Requested value: ticks between two steps.
pub const REQUEST_PACE: usize = 19;
/// Value of [`REQUEST_COUNT`] at the last adopted request.
pub const ADOPTED: usize = 20;
/// Number of the present pattern.
pub const PATTERN: usize = 21;
/// Pages of the present working set.
pub const WORKING_SET: usize = 22;
/// Present ticks between two steps.
pub const PACE: usize = 23;
/// Pages of the hot set: a tenth of the working set, at least 1.
pub const HOT_PAGES: usize = 24;
/// Number of epochs so far.
pub const EPOCHS: usize = 25;
/// Requested value: not 0 to reset [`MAX_GAP`]. The guest writes 0 back.
pub const REQUEST_GAP_RESET: usize = 26;
/// Constant: 1 if this vCPU prints.
pub const PRINTS: usize = 27;
/// Buffer of the printed line, 32 bytes.
pub const LINE: usize = 28;
/// Due time of the last step that kept a pace, on the time-stamp counter.
pub const LAST_STEP: usize = 32;
/// Time of the last line, on the time-stamp counter.
pub const LAST_LINE: usize = 33;
/// Constant: seed of the choice of steps that store zeros.
pub const ACT_SEED: usize = 34;
/// Constant: number of steps of 256 that store zeros.
pub const ZERO_OF_256: usize = 35;
/// The first of the epochs. Each has four words: first step, number of the pattern, pages of the working
/// set, 0.
pub const FIRST_EPOCH: usize = 36;
/// Number of epochs for which the page has space.
pub const EPOCHS_MAX: usize = (WORDS_PER_PAGE - FIRST_EPOCH) / 4;

/// Largest delay for which a late guest catches up, in ticks (some 20 ms).
pub const CATCH_UP_TICKS: i32 = 1 << 26;

/// Magic number: the bytes `TIDECTL1`.
pub const MAGIC_VALUE: u64 = u64::from_le_bytes(*b"TIDECTL1");

/// Words that do not change after the start.
pub(super) const CONSTANTS: [usize; 12] = [
    MAGIC,
    IDENTITY,
    SEED,
    NEIGHBOUR,
    FIRST_SEGMENT,
    SPLIT,
    SECOND_SEGMENT,
    SHARE_PAGES,
    LINE_TICKS,
    PRINTS,
    ACT_SEED,
    ZERO_OF_256,
];

/// The control page at the guest's start.
pub(super) fn page(tide: &Tide, worker: usize) -> [u64; WORDS_PER_PAGE] {
    let (config, share) = (&tide.config, &tide.shares[worker]);
    let pages = share.pages();
    let working_set = config.working_set_pages.unwrap_or(pages).min(pages);
    let address = |segment| layout::guest_address(&tide.ranges, segment);
    let first = share.segments()[0];
    let after_first = share.segments().get(1).map_or(0, address);
    let workers = tide.shares.len() as i64;
    let neighbour = ((worker as i64 + 1) % workers - worker as i64) * PAGE_SIZE as i64;
    let mut page = [0; WORDS_PER_PAGE];
    page[MAGIC] = MAGIC_VALUE;
    page[IDENTITY] = crate::model::PageId::new(worker, 0).0;
    page[SEED] = config.seed.wrapping_add(worker as u64 * 0x1_0000_0001);
    page[ACT_SEED] = crate::model::Acts::seed(page[SEED]);
    page[ZERO_OF_256] = u64::from(config.zero_of_256);
    page[NEIGHBOUR] = neighbour as u64;
    page[FIRST_SEGMENT] = address(&first);
    page[SPLIT] = first.pages;
    page[SECOND_SEGMENT] = after_first.wrapping_sub(first.pages * PAGE_SIZE as u64);
    page[SHARE_PAGES] = pages;
    page[LINE_TICKS] = config.heartbeat_ticks.unwrap_or(0);
    page[PRINTS] = u64::from(worker == 0 && config.heartbeat_ticks.is_some());
    page[PATTERN] = config.pattern as u64;
    page[WORKING_SET] = working_set;
    page[PACE] = config.pace_ticks;
    page[HOT_PAGES] = (working_set / 10).max(1);
    page[REQUEST_PATTERN] = config.pattern as u64;
    page[REQUEST_WORKING_SET] = working_set;
    page[REQUEST_PACE] = config.pace_ticks;
    page[EPOCHS] = 1;
    page[FIRST_EPOCH] = 1;
    page[FIRST_EPOCH + 1] = config.pattern as u64;
    page[FIRST_EPOCH + 2] = working_set;
    page
}
