use super::*;

const SOON: Duration = Duration::from_millis(10);

fn channels(count: usize) -> (Vec<Arc<Channel>>, Vec<Channel>) {
    let pairs = (0..count).map(|_| Channel::pair().unwrap());
    pairs.map(|(ours, theirs)| (Arc::new(ours), theirs)).unzip()
}

#[test]
fn session_begins_when_the_last_one_has_ended_and_all_its_channels_have_come() {
    let (lobby, (channels, _peers)) = (Lobby::new(2), channels(3));
    assert!(lobby.announce(1));
    assert_eq!(lobby.admit(1, SOON), Admission::NotYet, "the last one is still read");
    assert!(!lobby.put_main(1, &channels[0]));
    lobby.open();
    assert_eq!(lobby.admit(1, SOON), Admission::Open);

    assert!(lobby.put_lane(1, 0, &channels[1]).is_err(), "before its main channel");
    assert!(lobby.put_main(1, &channels[0]));
    assert!(lobby.put_lane(1, 1, &channels[2]).unwrap().is_none());
    assert!(lobby.put_lane(1, 1, &channels[1]).is_err(), "twice");
    assert!(lobby.put_lane(1, 2, &channels[1]).is_err(), "more than there are");
    assert!(lobby.put_lane(2, 0, &channels[1]).is_err(), "of another session");
    assert!(lobby.put_lane(1, 0, &channels[1]).unwrap().is_none(), "the answer is not out");
    assert_eq!((lobby.is_read(0), lobby.is_read(1), lobby.is_read(2)), (Some(false), None, Some(false)));
    let assembled = lobby.answered(1).unwrap();
    assert_eq!(lobby.is_read(1), Some(true));

    assert!(Arc::ptr_eq(&assembled.main, &channels[0]) && Arc::ptr_eq(&assembled.lanes[1], &channels[2]));
    assert_eq!(lobby.session(), 1);
    assert!(!lobby.announce(1), "it is there already");
    assert!(lobby.announce(2));
    assert_eq!(lobby.admit(2, SOON), Admission::NotYet, "the one that was just begun is read");
    lobby.open();
    assert_eq!(
        (lobby.is_read(1), lobby.is_read(2)),
        (Some(false), None),
        "it is lost, and the next may begin"
    );
}

#[test]
fn newer_session_takes_the_place_of_one_that_is_not_whole() {
    let (lobby, (channels, peers)) = (Lobby::new(1), channels(2));
    lobby.open();
    assert!(lobby.announce(3) && lobby.put_main(3, &channels[0]));
    assert!(!lobby.announce(2), "an old connection that comes back");
    assert!(lobby.announce(4));

    assert_eq!(peers[0].read_some(&mut [0; 1]).unwrap(), 0, "the older one's main channel is closed");
    assert!(lobby.answered(3).is_none() && lobby.put_lane(3, 0, &channels[1]).is_err());
    assert_eq!(lobby.admit(3, SOON), Admission::TooLate);
    assert_eq!(lobby.admit(4, SOON), Admission::Open);
    assert!(lobby.put_main(4, &channels[1]));
    lobby.end();
    assert_eq!(peers[1].read_some(&mut [0; 1]).unwrap(), 0);
    assert_eq!((lobby.admit(4, SOON), lobby.announce(5)), (Admission::TooLate, false));
}
