//! Without a return path, the source closes its connections when it has sent everything. The destination then loads
//! the guest from closed connections. Their queue pairs are in the error state, and most adapters refuse every change
//! to them.

use super::*;

const TRIES: usize = 8;

/// Asserts that the guest arrives each time, whichever change the adapters refuse.
fn assert_always_arrives(settings: &Settings, multifd: bool) {
    let capabilities = Capabilities { return_path: false, multifd, ..Capabilities::default() };
    for attempt in 0..TRIES {
        let lab = Lab::new(settings.clone());
        let run = lab.start(&writer(1000), capabilities, |params| {
            params.downtime_limit = Duration::from_secs(2);
            params.multifd_channels = 2;
        });

        let (outcome, arrival) = (run.migration.wait(), run.incoming.wait());

        println!("attempt {attempt}, multifd {multifd}, {settings:?}");
        assert_arrived(&outcome, &arrival, &run.target);
        drop(run);
        lab.assert_empty();
    }
}

#[test]
fn guest_arrives_over_connections_that_have_ended() {
    for multifd in [false, true] {
        assert_always_arrives(&Settings::new(), multifd);
        assert_always_arrives(&Settings::seeded(7), multifd);
    }
}

#[test]
fn guest_arrives_when_a_queue_pair_in_the_error_state_takes_no_requests() {
    let mut settings = Settings::new();
    settings.refuses_posts_in_error = true;
    for multifd in [false, true] {
        assert_always_arrives(&settings, multifd);
    }
}

#[test]
fn guest_arrives_when_a_queue_pair_in_the_error_state_refuses_every_change() {
    let mut settings = Settings::new();
    settings.refuses_changes_in_error = true;
    for multifd in [false, true] {
        assert_always_arrives(&settings, multifd);
    }
}
