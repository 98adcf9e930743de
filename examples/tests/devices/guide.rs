//! docs/writing-a-device.md quotes the GPIO card as it is.

/// Without indentation: a quotation begins at the left.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).collect()
}

#[test]
fn what_the_guide_quotes_is_in_the_file() {
    let guide = include_str!("../../../docs/writing-a-device.md");
    let card = lines(include_str!("../../src/bin/gpio.rs"));
    let quotations: Vec<_> = guide
        .split("```rust,ignore\n")
        .skip(1)
        .map(|rest| lines(rest.split("```").next().unwrap().trim_end()))
        .collect();
    assert!(quotations.len() > 5);
    for quotation in quotations {
        assert!(
            card.windows(quotation.len()).any(|part| part == quotation),
            "not in gpio.rs: {}",
            quotation.join("\n")
        );
    }
}
