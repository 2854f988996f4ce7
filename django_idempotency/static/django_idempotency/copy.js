"use strict";
// A button beside what can be copied. Without it, the field can be selected by hand.
document.addEventListener("DOMContentLoaded", () => {
    for (const field of document.querySelectorAll("input.idempotency-copyable")) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "button idempotency-copy";
        button.textContent = field.dataset.copy || "Copy";
        button.addEventListener("click", async () => {
            field.select();
            try {
                await navigator.clipboard.writeText(field.value);
            } catch {
                document.execCommand("copy"); // outside HTTPS there is no clipboard
            }
            button.dataset.done = "✓";
        });
        field.after(button);
    }
});
